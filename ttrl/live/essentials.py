"""Choose the essentials of a run, for a glance in a terminal, a notebook or a list of runs.

They come from the reader and the words of `ttrl ui` and the report; nothing here depends on the
place of display.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttrl.errors import TtrlError
from ttrl.facts import Pick, metric, number
from ttrl.messages import text_of
from ttrl.monitoring.finding import Finding
from ttrl.monitoring.followed_runs import FollowedRun, Stamp, State, readable, stamp_of
from ttrl.monitoring.progress_line import dead_share
from ttrl.monitoring.summary import validated
from ttrl.records import Sample
from ttrl.report.phrases import is_overfit, summary, written
from ttrl.report.samples import parsed
from ttrl.run_folder.reader import (
    RunData,
    held_out_metric,
    interval,
    model_name,
    total_seconds,
)
from ttrl.text import compact, present

_SAMPLE_FILES = ("rollouts.jsonl", "validation.jsonl")
_FIRST_BYTES = 2**16
_MOST_BYTES = 2**26
"""Of a line with a sample."""


@dataclass(frozen=True)
class Curve:
    """A figure of each iteration."""

    name: str
    values: Sequence[float | None]
    is_share: bool = False
    low: Sequence[float | None] = ()
    """The 95% interval; empty if unknown."""
    high: Sequence[float | None] = ()

    def written(self, value: float) -> str:
        """Write a value of the curve."""
        return written(value, self.is_share)

    @property
    def newest(self) -> str:
        """Return the newest known value; "" without one."""
        known = present(self.values)
        if known:
            return self.written(known[-1])
        return ""

    @property
    def newest_interval(self) -> str:
        """Return the newest interval; "" without one."""
        low, high = (present(side) for side in (self.low, self.high))
        if low and high:
            return f"{self.written(low[-1])} to {self.written(high[-1])}"
        return ""


@dataclass(frozen=True)
class SampleText:
    """The newest sample."""

    asked: str
    answer: str
    facts: list[str]
    """Its task, reward, metrics and end."""


@dataclass(frozen=True)
class Essentials:
    """A run now."""

    name: str
    state: State
    problem: str = ""
    """The reason a run cannot be read."""
    model: str = ""
    done: int | None = None
    """The newest iteration; None before the starting model is measured."""
    total: int | None = None
    seconds: float = 0.0
    """Of all iterations."""
    summary: str = ""
    iterations: list[int] = field(default_factory=list)
    main: list[Curve] = field(default_factory=list)
    """The held-out metric with its interval, and the reward."""
    others: list[Curve] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """The most serious first."""
    sample: SampleText | None = None


@dataclass(frozen=True)
class RunLine:
    """A run in a list."""

    name: str
    state: State
    error: str = ""
    model: str = ""
    done: int = 0
    total: int | None = None
    reward: str = ""
    held_out: str = ""
    metric: str = ""
    values: Sequence[float | None] = ()
    """The held-out metric of each iteration; the reward without one."""
    serious: int = 0
    """Findings of severity stop or warn."""


_OTHERS: tuple[tuple[str, Pick, bool], ...] = (
    ("loss", lambda row: row.train.loss, False),
    ("KL", lambda row: row.train.kl, False),
    ("entropy", lambda row: row.train.entropy, False),
    ("gradient norm", lambda row: row.train.grad_norm, False),
    ("tokens/s", lambda row: row.tokens_per_second, False),
    ("dead time", dead_share, True),
    ("cut off", lambda row: row.rollouts.truncated, True),
    ("|Δ logprob| p99.9", lambda row: row.compared.p999, False),
)


def essentials(run: FollowedRun) -> Essentials:
    """Return the essentials of a run; a damaged one has its problem."""
    data = readable(run)
    if isinstance(data, TtrlError):
        return Essentials(run.name, State("damaged"), str(data))
    state = run.state(counted=True)
    return Essentials(
        name=run.name,
        state=state,
        model=Path(model_name(data)).name,
        done=data.iterations[-1] if data.rows else None,
        total=_planned(data),
        seconds=total_seconds(data),
        summary=summary(data),
        iterations=data.iterations,
        main=_main(data),
        others=_others(data),
        findings=run.findings(),
        sample=_newest_sample(run, data, state),
    )


def run_line(run: FollowedRun) -> RunLine:
    """Return a run's line in a list: only its name before it is read; a damaged one has its
    error.
    """
    if not run.is_read:
        return RunLine(run.name, State("reading"))
    data = readable(run)
    if isinstance(data, TtrlError):
        return RunLine(run.name, State("damaged"), str(data))
    judged = held_out_metric(data)
    rewards = data.column(metric("reward"))
    values = rewards
    label = ""
    held_out = ""
    if judged is not None:
        values = data.column(judged.of)
        label = judged.label
        held_out = Curve(label, values).newest
    return RunLine(
        name=run.name,
        state=run.state(),
        model=Path(model_name(data)).name,
        done=[0, *data.iterations][-1],
        total=_planned(data),
        reward=Curve("reward", rewards[-20:]).newest,
        held_out=held_out,
        metric=label,
        values=values,
        serious=sum(one.severity != "note" for one in run.findings()),
    )


def _planned(run: RunData) -> int | None:
    """Return the number of iterations in the run's config."""
    total = run.config.get("iterations")
    if isinstance(total, int):
        return total
    return None


def _main(run: RunData) -> list[Curve]:
    curves = []
    judged = held_out_metric(run)
    if judged is not None:
        spans = [interval(row, judged.name) for row in run.rows]
        low, high = ([span and span[side] for span in spans] for side in (0, 1))
        name = validated(judged.label, overfits=is_overfit(run))
        curves.append(Curve(name, run.column(judged.of), judged.is_share, low, high))
    curves.append(Curve("reward", run.column(metric("reward"))))
    return [one for one in curves if present(one.values)]


def _others(run: RunData) -> list[Curve]:
    curves = [Curve(name, run.column(pick), is_share) for name, pick, is_share in _OTHERS]
    return [one for one in curves if present(one.values)]


def _newest_sample(run: FollowedRun, data: RunData, state: State) -> SampleText | None:
    """Return the sample finished last: of the iteration under way, or of the newest file."""
    try:
        group = json.loads(run.newest_task() or b"{}")
        found = parsed(json.dumps(group["samples"][-1]).encode())
    except (ValueError, KeyError, IndexError, TypeError):
        found = None
    iterations = {one.iteration for one in state.under_way} | set(data.iterations[-2:])
    for iteration in sorted(iterations, reverse=True):
        for name in _SAMPLE_FILES:
            path = data.iteration_folder(iteration) / name
            if found is None:
                found = _last_sample(path, stamp_of(path))
    if found is None:
        return None
    return _sample_text(found)


@functools.lru_cache(maxsize=64)
def _last_sample(path: Path, stamp: Stamp) -> Sample | None:
    """Return the last sample of a file. stamp: the file's `stamp_of`."""
    size = _FIRST_BYTES
    try:
        with path.open("rb") as file:
            while True:
                start = max(0, stamp[1] - size)
                file.seek(start)
                lines = file.read().rstrip(b"\n").split(b"\n")
                if len(lines) > 1 or not start or size > _MOST_BYTES:
                    return parsed(lines[-1])
                size *= 8
    except OSError:
        return None


def _sample_text(sample: Sample) -> SampleText:
    asked = [text_of(one.get("content")) for one in sample.messages if isinstance(one, dict)]
    facts = [sample.task_id]
    if sample.reward is not None:
        facts.append(f"reward {compact(sample.reward)}")
    scores = {name: number(value) for name, value in sample.metrics.items()}
    facts += [f"{name} {compact(value)}" for name, value in scores.items() if value is not None]
    if sample.token_ids is not None:
        facts.append(f"{len(sample.token_ids)} tokens")
    if sample.finish_reason == "length":
        facts.append("cut off")
    if sample.error:
        facts.append(f"failed: {sample.error}")
    return SampleText(["", *asked][-1], sample.text, facts)

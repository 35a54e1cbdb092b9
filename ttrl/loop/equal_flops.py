"""Train supervised arms of a comparison with a run: from its start, on as many FLOPs as it took."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrl.configs.run import TrainConfig
from ttrl.facts import TrainFacts
from ttrl.loop.supervised_run import HeldOut, held_out_config, supervised_run
from ttrl.loop.train import local_model
from ttrl.plans.supervised import (
    Fitted,
    Hardware,
    Supervised,
    fit_supervised,
    sft_settings,
    start_settings,
)
from ttrl.report.compared_runs import spent
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_mapping, read_run
from ttrl.server.chat_template import with_chat_template
from ttrl.system.console import Console
from ttrl.system.files import remove_folder, write_jsonl
from ttrl.tasks.task import Task
from ttrl.text import si_spaced

_HELD_OUT_SHARE = 20
_MOST_HELD_OUT = 256


def made_start(
    run: Path,
    config: TrainConfig,
    start: Supervised,
    hardware: Hardware,
    served: TrainConfig,
    held_out: Sequence[Task],
) -> Path:
    """Train the model for a run's start, unless it is good enough as it is; return its folder.

    config: the run's, as it was given. served: the same with every setting filled in.
    """
    write_jsonl(run / "examples.jsonl", [dict(one) for one in start.examples])
    model = local_model(config.model, chat_template=config.chat_template is None)
    settings = {
        **start_settings(config, start.settings, cuda=hardware.cuda),
        "model": str(with_chat_template(model, config.chat_template, run.absolute() / "model")),
        "data": str(run / "examples.jsonl"),
    }
    fitted = fit_supervised(settings, config, hardware, run)
    # One answer tells well enough when to stop; a run may ask for eight.
    once = dataclasses.replace(held_out_config(served, start.metric), validation_samples=1)
    return supervised_run(
        run,
        fitted.settings,
        HeldOut(held_out, once),
        by="steps",
        marks=start.marks,
        stop_at=start.stop_at,
        processes=fitted.processes,
    )


def spread_places(places: Sequence[int], last: int, count: int) -> list[int]:
    """Return about `count` of the places, at even distances up to the last, which is always one of
    them; never 0.
    """
    if not places:
        return [last]
    ends = (last * number / count for number in range(1, count + 1))
    nearest = {min(places, key=lambda place: abs(place - end)) for end in ends}
    return sorted(nearest - {0} | {last})


def _edge(best: float, rates: Sequence[float]) -> str:
    """Return a remark if the best of several rates is the first or last of them."""
    if len(rates) < 2 or min(rates) < best < max(rates):
        return ""
    if best == max(rates):
        which, other = "largest", "larger"
    else:
        which, other = "smallest", "smaller"
    return f". It is the {which} of them; a {other} one may be better still (--sft lr=…)"


@dataclass(frozen=True)
class EqualFlops:
    """Train supervised arms next to a run."""

    rl: Path
    """The run, at its end."""
    config: TrainConfig
    """The run's, as it was given."""
    hardware: Hardware
    served: TrainConfig
    """The run's config with every setting filled in."""
    held_out: Sequence[Task]
    searches: bool
    """Whether some examples are held out for `search`; no arm is trained on them then."""

    def train(self, sft: Supervised, run: Path, points: int) -> Path:
        """Train an arm, and ask the held-out tasks at so many points, where the run asked them
        too, and at the end; return the checkpoint.
        """
        flops = self._flops
        run_data = read_run(self.rl)
        there = set(run_data.numbers_with("validation.jsonl"))
        asked = [place for place, number in enumerate(run_data.iterations) if number in there]
        chosen = spread_places(asked, len(flops) - 1, points)
        fitted = self._fitted(sft, run)
        return supervised_run(
            run,
            fitted.settings,
            HeldOut(self.held_out, held_out_config(self.served, self.served.validation_metric)),
            by="flops",
            marks=[flops[place] for place in chosen],
            before=RunFolder(self.rl).iteration(0),
            processes=fitted.processes,
        )

    def search(
        self, sft: Supervised, rates: Sequence[float], folder: Path
    ) -> tuple[float, list[list[str]]]:
        """Return the learning rate with the lowest loss of held-out examples, and a table of all
        that were tried, its heading first.

        A rate is tried on as many FLOPs as an arm takes: short trainings prefer high rates, and do
        not show overfitting.
        """
        tried = []
        for rate in rates:
            run = folder / f"{rate:g}"
            fitted = self._fitted(
                dataclasses.replace(sft, settings={**sft.settings, "lr": rate}), run
            )
            supervised_run(
                run,
                {**fitted.settings, "held_out": str(self._examples(sft)[1])},
                HeldOut((), held_out_config(self.served, self.served.validation_metric)),
                by="flops",
                marks=[self._flops[-1]],
                processes=fitted.processes,
            )
            iteration = RunFolder(run).iteration(1)
            for name in ("checkpoint", "state"):
                remove_folder(iteration.path / name)
            steps = (iteration.marker(TrainFacts) or TrainFacts()).taken()
            last = steps[-1]
            assert last.held_out_loss is not None, "the recipe has measured it"
            trained = sum(step.flops or 0.0 for step in steps)
            measured = last.held_out_flops or 0.0
            tried.append((last.held_out_loss, rate, len(steps), trained, measured))
        best = min(tried)
        table = [["learning rate", "held-out loss", "steps", "training FLOP", "loss FLOP", ""]]
        for one in tried:
            loss, rate, count, *costs = one
            spent_on = [si_spaced(cost).strip() for cost in costs]
            chosen = "chosen" if one == best else ""
            table.append([f"{rate:g}", f"{loss:.4f}", str(count), *spent_on, chosen])
        sums = [sum(one[3] for one in tried), sum(one[4] for one in tried)]
        together = [si_spaced(one).strip() for one in sums]
        table.append(["together, for no arm", "", "", *together, ""])
        whole = si_spaced(sum(sums)).strip()
        Console().line(
            f"SFT: of the learning rates {', '.join(f'{rate:g}' for rate in rates)}, {best[1]:g} "
            f"has the lowest held-out loss, {best[0]:.4f}; their {whole}FLOP count for no arm"
            + _edge(best[1], rates)
        )
        return best[1], table

    @property
    def _flops(self) -> list[float]:
        """Return the run's FLOPs after each iteration."""
        found = spent(read_run(self.rl))["flops"]
        known = [value for value in found if value is not None]
        assert len(known) == len(found), "ttrl counts the FLOPs of every iteration"
        return known

    def _fitted(self, sft: Supervised, run: Path) -> Fitted:
        """Return an arm's settings, with its data."""
        made, _ = TrainConfig.examine(read_mapping(self.rl / "config.yaml"))
        settings = {**sft_settings(made, sft.settings), "data": str(self._examples(sft)[0])}
        return fit_supervised(settings, self.config, self.hardware, run)

    def _examples(self, sft: Supervised) -> tuple[Path, Path]:
        """Write the examples, and those held out for the search; return both files."""
        rows = [dict(one) for one in sft.examples]
        held_out = 0
        if self.searches:
            held_out = max(1, min(len(rows) // _HELD_OUT_SHARE, _MOST_HELD_OUT))
        kept = len(rows) - held_out
        trained = self.rl.parent / "examples.jsonl"
        others = self.rl.parent / "held_out_examples.jsonl"
        write_jsonl(trained, rows[:kept])
        write_jsonl(others, rows[kept:])
        return trained, others

"""Build an iteration's line of metrics.jsonl from the markers of its phases."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ttrl.configs.run import TrainConfig
from ttrl.facts import (
    FLOPS_PARTS,
    CurriculumFacts,
    CurriculumFigures,
    EntropyResponse,
    Flops,
    MetricsRow,
    PackFacts,
    PackFigures,
    PhaseSeconds,
    PrepareFacts,
    RolloutsFacts,
    ServerFigures,
    Step,
    StepMeans,
    Sync,
    TrainFacts,
    TrainFigures,
    Unfinished,
    ValidateFacts,
    number,
    part_of,
    ratio,
)
from ttrl.run_folder.folder import IterationFolder
from ttrl.run_folder.recent_noise import WINDOW, recent_noise
from ttrl.system.files import read_object, write_json
from ttrl.text import present

PHASES = ("prepare", "rollouts", "pack", "train", "validate")
"""The possible phases of an iteration, in order."""
TOO_LONG_WORDS = {"too_long": "too long", "truncated": "cut off", "extended": "in longer rows"}
"""Keys of `PackedTensors.dropped` for samples longer than a row, in words for people."""
_ADDED_UP = ("flops", "seconds", "padding_tokens", "logical_tokens")


def metrics_row(iteration: IterationFolder) -> MetricsRow:
    """Return the metrics from an iteration's finished phases."""
    prepared = iteration.marker(PrepareFacts) or PrepareFacts()
    sampled = iteration.marker(RolloutsFacts) or RolloutsFacts()
    packed = iteration.marker(PackFacts) or PackFacts()
    trained = iteration.marker(TrainFacts) or TrainFacts()
    held_out = iteration.marker(ValidateFacts) or ValidateFacts()
    seconds = PhaseSeconds(
        prepare=prepared.seconds,
        sample=sampled.seconds,
        pack=packed.seconds,
        train=trained.seconds,
        validate=held_out.seconds,
        sync=(sampled.sync_seconds or 0.0) + (held_out.sync_seconds or 0.0),
    )
    syncs = [one.sync for one in (prepared, sampled, held_out) if one.sync]
    steps = trained.taken()
    row = MetricsRow(
        iteration=iteration.number,
        seconds=seconds.replace(total=sum(seconds.by_phase().values())),
        groups=packed.groups,
        rollouts=packed.rollouts,
        pack=part_of(PackFigures, packed),
        trained=trained.trained,
        flops=_flops(sampled, held_out, steps),
        sync=syncs[-1] if syncs else Sync(),
    )
    row = _with_samples(row, sampled)
    if steps:
        compared = steps[0].sampler_trainer
        row = row.replace(
            train=_training(steps, unchanged=_same_weights(iteration)),
            sampler_trainer=None if compared is None else compared.without_tokens(),
            gradient_noise=recent_noise(_recent_steps(iteration)),
            entropy_response=_entropy_response(steps),
        )
    row = _with_validation(row, held_out)
    return row.replace(server=_server(iteration, sampled, row.train.matmul_peak))


def _with_samples(row: MetricsRow, sampled: RolloutsFacts) -> MetricsRow:
    stats = sampled.stats
    if stats is None:
        return row
    return row.replace(
        reward=stats.mean_reward,
        metrics=stats.metrics,
        partial_metrics=stats.partial_metrics or None,
        samples=stats.num_samples,
        failed=stats.num_failed,
        finish_reasons=stats.finish_reasons,
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        tokens_per_second=stats.tokens_per_second,
        grading_seconds=stats.grading_seconds,
        new_completion_tokens=sampled.new_completion_tokens,
        staleness=sampled.staleness,
        unfinished=sampled.unfinished or Unfinished(),
        dropped_groups=sampled.dropped_groups,
        extra_tasks=sampled.extra_tasks,
        curriculum=part_of(CurriculumFigures, sampled.curriculum or CurriculumFacts()),
    )


def _with_validation(row: MetricsRow, held_out: ValidateFacts) -> MetricsRow:
    stats = held_out.stats
    if stats is None:
        return row
    return row.replace(
        validation_reward=stats.mean_reward,
        validation=stats.metrics,
        validation_samples=stats.num_graded,
        validation_failed=stats.num_failed,
        validation_partial_metrics=stats.partial_metrics or None,
        validation_sampling=held_out.sampling,
        validation_intervals=held_out.intervals,
    )


def _server(
    iteration: IterationFolder, sampled: RolloutsFacts, peak: float | None
) -> ServerFigures:
    """Return the servers' speed during sampling; empty if unknown.

    They may have written the previous policy's held-out samples at the same time: the phase to end
    last has counted both.
    """
    flops = sampled.flops
    before = _sibling(iteration, iteration.number - 1)
    held_out = before.marker(ValidateFacts)
    ended = iteration.finished("rollouts")
    last = before.finished("validate")
    if held_out and ended and last and last - (held_out.seconds or 0.0) < ended < last:
        flops = held_out.flops
    if flops is None or flops.per_second is None:
        return ServerFigures()
    speed = flops.per_second
    return ServerFigures(flops_per_second=speed, peak_share=speed / peak if peak else None)


def _training(steps: Sequence[Step], *, unchanged: bool) -> TrainFigures:
    """Return means and sums over the optimizer steps of an iteration."""
    # Skipped steps have no loss; some have no KL yet.
    taken = [step for step in steps if step.skipped is None]
    means = {}
    for name in StepMeans.__struct_fields__:
        values = present(getattr(step, name) for step in taken)
        if values:
            means[name] = sum(values) / len(values)
    sums = {
        name: sum(getattr(step, name) or 0 for step in steps)
        for name in _ADDED_UP
        if getattr(steps[0], name) is not None
    }
    return TrainFigures(
        **means,
        lr=steps[-1].lr,
        steps=len(steps),
        global_step=steps[-1].global_step,
        **sums,
        seconds_by_part=_together(sum, [step.seconds_by_part for step in steps]),
        memory_peaks=_together(max, [step.memory_peaks for step in steps]),
        skipped=len(steps) - len(taken) or None,
        unchanged=unchanged or None,
    )


def _flops(sampled: RolloutsFacts, held_out: ValidateFacts, steps: Sequence[Step]) -> Flops:
    """Return the phases' FLOPs by part: prefill and decode of the rollouts, held-out samples, and
    training.
    """
    parts: dict[str, float] = {}
    if sampled.flops is not None:
        parts |= {"prefill": sampled.flops.prefill, "decode": sampled.flops.decode}
    if held_out.flops is not None:
        parts["validation"] = held_out.flops.prefill + held_out.flops.decode
    parts |= _together(sum, [step.flops_by_part for step in steps]) or {}
    if not parts:
        return Flops()
    known = {name: value for name, value in parts.items() if name in FLOPS_PARTS}
    return Flops(**known, total=sum(parts.values()))


def _entropy_response(steps: Sequence[Step]) -> EntropyResponse:
    """Return the means over the measured steps of an iteration, and their share of its time."""
    measured = [step.entropy_response for step in steps if step.entropy_response is not None]
    known = [(one, one.first) for one in measured if one.first is not None]
    if not known:
        return EntropyResponse()
    seconds = math.fsum(one.seconds or 0.0 for one, _ in known)
    return EntropyResponse(
        steps=len(known),
        first=statistics.fmean(first for _, first in known),
        naive=statistics.fmean(one.naive or 0.0 for one, _ in known),
        entropy=statistics.fmean(one.entropy or 0.0 for one, _ in known),
        seconds=seconds,
        share=ratio(seconds, math.fsum(step.seconds or 0.0 for step in steps)),
    )


def _recent_steps(iteration: IterationFolder) -> list[Step]:
    """Return the last optimizer steps of this and earlier iterations, as many as are averaged."""
    steps: list[Step] = []
    for earlier in range(iteration.number, 0, -1):
        trained = _sibling(iteration, earlier).marker(TrainFacts) or TrainFacts()
        steps = [*trained.taken(), *steps]
        if len(steps) >= WINDOW:
            break
    return steps


def _same_weights(iteration: IterationFolder) -> bool:
    """Return whether training left every weight file unchanged, bit for bit."""
    after = iteration.weights("train")
    for earlier in range(iteration.number - 1, -1, -1):
        before = _sibling(iteration, earlier)
        if earlier == 0:
            return bool(after) and before.weights("prepare") == after
        if (before.marker(TrainFacts) or TrainFacts()).trained:
            return bool(after) and before.weights("train") == after
    return False


def _sibling(iteration: IterationFolder, number: int) -> IterationFolder:
    return IterationFolder(iteration.path.parent / f"{number:04d}", number)


def _together(
    how: Callable[[list[float]], float], parts: Sequence[dict[str, float] | None]
) -> dict[str, float] | None:
    """Combine a mapping over all steps; None if no step has it."""
    known = [part for part in parts if part]
    keys = dict.fromkeys(key for part in known for key in part)
    return {key: how([part[key] for part in known if key in part]) for key in keys} or None


def validation_metric(row: MetricsRow, config: TrainConfig) -> float | None:
    """Return the run's validation metric from one metrics row."""
    return number(row.held_out(config.validation_metric))


def has_reached(row: MetricsRow, config: TrainConfig) -> bool:
    """Return whether the run ends with this row."""
    value = validation_metric(row, config)
    return config.stop_at is not None and value is not None and value >= config.stop_at


STATE_FILE = "loggers.json"


def forget_rows(folder: Path, first: int) -> None:
    """Make loggers log the rows of the iterations from `first` on again, since these are done
    again. Raises StorageError.
    """
    state = folder / "logs" / STATE_FILE
    seen = read_seen(state)
    if seen:
        write_json(state, {"seen": {name: min(last, first - 1) for name, last in seen.items()}})


def read_seen(state: Path) -> dict[str, int]:
    """Return the last iteration given to each logger."""
    try:
        return {str(name): int(last) for name, last in read_object(state)["seen"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}

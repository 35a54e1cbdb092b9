"""The line of metrics.jsonl of an iteration, put together from what its phases left in their
markers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.run_folder.folder import IterationFolder
from ttrl.run_folder.recent_noise import WINDOW, recent_noise
from ttrl.system.files import write_json

PHASES = ("prepare", "rollouts", "pack", "train", "validate")
FLOPS_PARTS = (
    "prefill",
    "decode",
    "validation",
    "training",
    "recomputation",
    "prepass",
    "reference",
)
"""What an iteration's FLOPs are spent on; "total" and, over the run, "cumulated" stand beside them.
"""
TOO_LONG_WORDS = {"too_long": "too long", "truncated": "cut off", "extended": "in longer rows"}
"""What `PackedTensors.dropped` counts of samples that are longer than a row, for people."""
_AVERAGED = (
    *(
        "loss",
        "policy_loss",
        "value_loss",
        "kl",
        "kl_share",
        "entropy",
        "grad_norm",
        "ess",
        "peak_share",
        "tokens_per_second",
    ),
    *(
        "clip_fraction_low",
        "clip_fraction_high",
        "dual_clip_fraction",
        "correction",
        "capped_fraction",
        "value_error",
    ),
    *("matmul_peak", "kl_coefficient"),
)
_COLUMNS = {
    "rollouts": "sample",
    "prepare": "prepare",
    "pack": "pack",
    "train": "train",
    "validate": "validate",
}


def metrics_row(iteration: IterationFolder) -> dict[str, Any]:
    markers = {phase: iteration.marker(phase) for phase in PHASES}
    done = {phase: marker for phase, marker in markers.items() if marker is not None}
    seconds = {_COLUMNS[phase]: marker["seconds"] for phase, marker in done.items()}
    seconds["sync"] = sum(marker.get("sync_seconds", 0.0) for marker in done.values())
    row: dict[str, Any] = {
        "iteration": iteration.number,
        "seconds": seconds | {"total": sum(seconds.values())},
    }
    if "rollouts" in done:
        stats = done["rollouts"]["stats"]
        row |= {"reward": stats["mean_reward"], "metrics": stats["metrics"]}
        row |= {"partial_metrics": partial} if (partial := stats.get("partial_metrics")) else {}
        row |= {
            "samples": stats["num_samples"],
            "failed": stats["num_failed"],
            "finish_reasons": stats["finish_reasons"],
        }
        row |= {
            name: stats[name]
            for name in ("prompt_tokens", "completion_tokens", "tokens_per_second")
        }
        row |= (
            {"grading_seconds": stats["grading_seconds"]}
            if stats.get("grading_seconds") is not None
            else {}
        )
        names = (
            "new_completion_tokens",
            "staleness",
            "unfinished",
            "dropped_groups",
            "extra_tasks",
        )
        row |= {name: done["rollouts"][name] for name in names if name in done["rollouts"]}
        curriculum = done["rollouts"].get("curriculum")
        if curriculum:
            row["curriculum"] = {
                name: one
                for name, one in curriculum.items()
                if name not in ("turns", "level_scores")
            }
    if "pack" in done:
        row |= {"groups": done["pack"]["groups"]}
        row |= {"rollouts": done["pack"]["rollouts"]} if "rollouts" in done["pack"] else {}
        row |= {
            "pack": {
                k: v for k, v in done["pack"].items() if k not in ("groups", "rollouts", "seconds")
            }
        }
    if "train" in done:
        row |= {"trained": done["train"]["trained"]} | _training_summary(
            done["train"].get("steps", [])
        )
        if "train" in row and (noise := recent_noise(_recent_steps(iteration))):
            row["gradient_noise"] = noise
        if "train" in row and _same_weights(iteration):
            row["train"]["unchanged"] = True
    if "validate" in done:
        stats = done["validate"]["stats"]
        row |= {"validation_reward": stats["mean_reward"], "validation": stats["metrics"]}
        row |= {"validation_samples": stats["num_graded"], "validation_failed": stats["num_failed"]}
        row |= (
            {"validation_partial_metrics": partial}
            if (partial := stats.get("partial_metrics"))
            else {}
        )
        row |= {
            f"validation_{name}": done["validate"][name]
            for name in ("sampling", "intervals")
            if name in done["validate"]
        }
    parts = _flops(done)
    if parts:
        row["flops"] = parts | {"total": sum(parts.values())}
    speed = _server_speed(iteration, done)
    if speed is not None:
        peak = row.get("train", {}).get("matmul_peak")
        row["server"] = {"flops_per_second": speed} | ({"peak_share": speed / peak} if peak else {})
    syncs = [marker["sync"] for marker in done.values() if marker.get("sync")]
    return row | ({"sync": syncs[-1]} if syncs else {})


def _server_speed(iteration: IterationFolder, done: dict[str, dict[str, Any]]) -> float | None:
    """Return the servers' FLOPs per second while they sampled; None where it is not known.

    Beside an iteration's samples they may have written the held-out ones of the policy before: the
    phase that ended last has counted both.
    """
    marker = done.get("rollouts")
    ended = iteration.finished("rollouts")
    before = IterationFolder(
        iteration.path.parent / f"{iteration.number - 1:04d}", iteration.number - 1
    )
    held_out = before.marker("validate")
    last = before.finished("validate")
    if held_out and ended and last and last - held_out["seconds"] < ended < last:
        marker = held_out
    speed: float | None = (marker or {}).get("flops", {}).get("per_second")
    return speed


def _training_summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over the optimizer steps of an iteration, and the comparison of sampler and
    trainer.
    """
    if not steps:
        return {}
    train: dict[str, Any] = {}
    for name in _AVERAGED:
        # Steps that were skipped have no loss; some have no KL yet.
        values = [
            step[name] for step in steps if step.get(name) is not None and "skipped" not in step
        ]
        train |= {name: sum(values) / len(values)} if values else {}
    train |= {"lr": steps[-1]["lr"], "steps": len(steps), "global_step": steps[-1]["global_step"]}
    counts = ("flops", "seconds", "padding_tokens", "logical_tokens")
    train |= {name: sum(step[name] for step in steps) for name in counts if name in steps[0]}
    train |= _added_up("seconds_by_part", sum, steps) | _added_up("memory_peaks", max, steps)
    skipped = sum("skipped" in step for step in steps)
    train |= {"skipped": skipped} if skipped else {}
    compared = steps[0].get("sampler_trainer")
    if isinstance(compared, dict):  # the tokens themselves stay in train.jsonl
        compared = {name: value for name, value in compared.items() if name != "worst"}
        if isinstance(own := compared.get("own_weights"), dict):
            compared["own_weights"] = {
                name: value for name, value in own.items() if name != "worst"
            }
    return {"train": train, "sampler_trainer": compared}


def _flops(done: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return what the phases computed: to read and to write the rollouts, for held-out samples, and
    in training, by part.
    """
    sampled, held_out = (done.get(phase, {}).get("flops", {}) for phase in ("rollouts", "validate"))
    parts = {name: sampled[name] for name in ("prefill", "decode") if name in sampled}
    parts |= {"validation": held_out["prefill"] + held_out["decode"]} if held_out else {}
    return parts | _added_up("flops_by_part", sum, done.get("train", {}).get("steps", [])).get(
        "flops_by_part", {}
    )


def _recent_steps(iteration: IterationFolder) -> list[dict[str, Any]]:
    """Return the lines of the last optimizer steps, as many as are averaged, of this iteration and
    those before it.
    """
    steps: list[dict[str, Any]] = []
    for number in range(iteration.number, 0, -1):
        marker = (
            IterationFolder(iteration.path.parent / f"{number:04d}", number).marker("train") or {}
        )
        steps = [*marker.get("steps", []), *steps]
        if len(steps) >= WINDOW:
            break
    return steps


def _same_weights(iteration: IterationFolder) -> bool:
    """Return whether training left every file of weights as it was, bit for bit."""
    after = iteration.weights("train")
    for number in range(iteration.number - 1, -1, -1):
        before = IterationFolder(iteration.path.parent / f"{number:04d}", number)
        if number == 0 or (before.marker("train") or {}).get("trained"):
            return bool(after) and before.weights("train" if number else "prepare") == after
    return False


def _added_up(
    name: str, how: Callable[[list[float]], float], steps: list[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return a mapping that steps have, over all of them; nothing where none has it."""
    parts = [step[name] for step in steps if isinstance(step.get(name), dict)]
    keys = dict.fromkeys(key for part in parts for key in part)
    found = {key: how([part[key] for part in parts if part.get(key) is not None]) for key in keys}
    if found:
        return {name: found}
    return {}


def validation_metric(row: dict[str, Any], config: TrainConfig) -> float | None:
    """Return the number by which a run is judged, from one metrics row."""
    if config.validation_metric == "reward":
        return row.get("validation_reward")
    return (row.get("validation") or {}).get(config.validation_metric)


def has_reached(row: dict[str, Any], config: TrainConfig) -> bool:
    """Return whether the run ends with this row."""
    value = validation_metric(row, config)
    return config.stop_at is not None and value is not None and value >= config.stop_at


STATE_FILE = "loggers.json"


def forget_rows(folder: Path, first: int) -> None:
    """Make loggers log the rows of the iterations from `first` on again, which are done again.
    Raises StorageError.
    """
    state = folder / "logs" / STATE_FILE
    seen = read_seen(state)
    if seen:
        write_json(state, {"seen": {name: min(last, first - 1) for name, last in seen.items()}})


def read_seen(state: Path) -> dict[str, int]:
    """Return the last iteration that each logger was given."""
    try:
        return {
            str(name): int(last)
            for name, last in json.loads(state.read_text(encoding="utf-8"))["seen"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

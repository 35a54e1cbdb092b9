"""Compute a run's disk needs, for a plan and for the check before the start.

Sizes of checkpoints and states come from the model's config or from existing ones; the pruning
rules give their largest number. A continued run measures its rollouts and packed rows. For a new
run, the check takes the maximum under `max_tokens`, and a plan its expected lengths.
"""

import errno
from dataclasses import dataclass
from pathlib import Path

from ttrl.configs.run import TrainConfig
from ttrl.costs.storage import PACKED_POSITION_BYTES, iteration_bytes
from ttrl.errors import ModelFolderError, StorageError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.pruning import most_kept
from ttrl.system.files import free_bytes, read_object, size_of
from ttrl.text import si_spaced

NEXT_ITERATIONS = 2
"""Iterations that must fit; otherwise the run does not start."""
SAMPLED_TOKEN_BYTES = 40
"""Bytes per token in rollouts.jsonl: id, log-probability, text."""
_CACHED_TOKEN_BYTES = 20
_FOLDERS = ("checkpoint", "state")


@dataclass(frozen=True)
class DiskNeeds:
    """Hold sizes in bytes. `next` and `whole` come on top of the run folder's present contents."""

    checkpoint: float
    state: float
    others: float
    """All other files of an iteration: rollouts, packed rows, logs; also the cache, if it is a
    folder.
    """
    next: float
    """Peak of checkpoints and states during the next NEXT_ITERATIONS iterations."""
    whole: float
    """Peak until the end of the run."""
    free: float | None
    """None if the file system does not tell."""


def disk_needs(
    config: TrainConfig, model: Path, folder: RunFolder, validation_tasks: int = 0
) -> DiskNeeds | None:
    """Return a run's remaining disk needs; None if neither the model's config nor an existing
    checkpoint tells sizes.
    """
    done = _last_trained(folder)
    sizes = _measured(folder, done) or _estimated(config, model)
    if sizes is None:
        return None
    there = [
        sum((folder.iteration(n).path / name).is_dir() for n in range(1, done + 1))
        for name in _FOLDERS
    ]
    others = _others_measured(folder, done) or _others_at_most(config, validation_tasks)
    return needs_after(config, done, there, sizes, others, free_bytes(folder.path))


def needs_after(
    config: TrainConfig,
    done: int,
    there: list[int],
    sizes: tuple[float, float],
    others: float,
    free: float | None,
) -> DiskNeeds:
    """Return a run's needs after `done` iterations; `there` and `sizes` describe the checkpoints
    and states on disk.
    """

    def more(last: int) -> float:
        """Return the bytes added at the fullest moment up to the end of iteration `last`."""
        peaks = [most_kept(config, number) for number in range(done + 1, last + 1)]
        return max(
            (
                sum(
                    max(0, most - has) * size
                    for most, has, size in zip(peak, there, sizes, strict=True)
                )
                for peak in peaks
            ),
            default=0.0,
        )

    return DiskNeeds(
        *sizes,
        others=others,
        next=more(min(done + NEXT_ITERATIONS, config.iterations)),
        whole=more(config.iterations) + others * max(0, config.iterations - done),
        free=free,
    )


def check_disk(
    config: TrainConfig, model: Path, folder: RunFolder, validation_tasks: int
) -> str | None:
    """Return a warning if the whole run may not fit. Raises StorageError if the next iterations
    cannot.
    """
    needs = disk_needs(config, model, folder, validation_tasks)
    if needs is None:
        return None
    return judge_disk(needs, folder.path)


def judge_disk(needs: DiskNeeds, folder: Path) -> str | None:
    """Warn or raise as `check_disk` does."""
    if needs.free is None or needs.whole <= needs.free:
        return None
    free = f"{si_spaced(needs.free)}B"
    each = (
        f"{si_spaced(needs.checkpoint)}B a checkpoint, {si_spaced(needs.state)}B an optimizer state"
    )
    way_out = (
        "make room, or choose another place for `run`. Smaller checkpoints: "
        "training={'checkpoint_dtype': 'bf16'}; fewer: keep_checkpoints=3, keep_best=1 and no "
        "keep_every; tiny: adapters (lora_rank)"
    )
    if needs.next > needs.free:
        raise StorageError(
            errno.ENOSPC,
            f"{folder}: the next {NEXT_ITERATIONS} iterations need {si_spaced(needs.next)}B "
            f"({each}), but only {free} are free; {way_out}",
        )
    return (
        f"{folder}: the whole run may need {si_spaced(needs.whole)}B more ({each}, up to "
        f"{si_spaced(needs.others)}B an iteration for rollouts and packed rows), but only {free} "
        f"are free; {way_out}. On a full disk, a run stops without losing anything"
    )


def _last_trained(folder: RunFolder) -> int:
    number = 0
    while folder.iteration(number + 1).is_done("train"):
        number += 1
    return number


def _measured(folder: RunFolder, done: int) -> tuple[float, float] | None:
    version = folder.written_version(done)
    path = folder.iteration(version).path
    if not version or not all((path / name).is_dir() for name in _FOLDERS):
        return None
    return float(size_of(path / "checkpoint")), float(size_of(path / "state"))


def _estimated(config: TrainConfig, model: Path) -> tuple[float, float] | None:
    try:
        each = iteration_bytes(
            read_object(model / "config.json"),
            config.recipe_config({}),
        )
    # The costs do not cover this family; it may still train.
    except (OSError, ValueError, KeyError, TypeError, ModelFolderError):
        return None
    return each["checkpoint"], each["state"]


def _others_measured(folder: RunFolder, done: int) -> float:
    last = [folder.iteration(number).path for number in range(max(1, done - 2), done + 1)]
    total = sum(size_of(path) - sum(size_of(path / name) for name in _FOLDERS) for path in last)
    if last:
        return total / len(last)
    return 0.0


def _others_at_most(config: TrainConfig, validation_tasks: int) -> float:
    tasks = config.tasks_per_iteration + (
        config.extra_task_limit if config.dynamic_sampling is not None else 0
    )
    sampled = tasks * config.samples_per_task * config.max_tokens
    if config.tokens_per_iteration is not None:
        sampled = min(
            sampled, config.tokens_per_iteration + config.samples_per_task * config.max_tokens
        )
    held_out = validation_tasks * config.validation_samples / config.validate_every
    validated = held_out * config.max_tokens
    if any("://" not in place or place.startswith("file:") for place in config.cache):
        cached = _CACHED_TOKEN_BYTES
    else:
        cached = 0
    each = SAMPLED_TOKEN_BYTES + cached
    return float(sampled * (each + PACKED_POSITION_BYTES) + validated * each)

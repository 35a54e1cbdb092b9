"""Handle failures during training: non-finite numbers and exhausted memory.

A step with a NaN or infinite loss or gradient is skipped: its gradient is discarded, the state
stays unchanged, and training continues with the next step. (With `optimizer_in_backward`,
parameters with finite gradients are stepped before the fault is known.) All ranks decide alike,
from sums over the ranks.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from ttrl.configs import TrainingConfig
from ttrl.costs.memory import Device, Workload
from ttrl.costs.memory import savings as savings_by_setting
from ttrl.data.packing.pack import PackedTensors
from ttrl.errors import DivergedError, ModelFolderError, TrainerMemoryError
from ttrl.text import gib
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.parallel.distributed import Ranks, model_shape
from ttrl.training.parallel.sharding import local_part
from ttrl.training.policy.policy import Policy


def savings(
    config: TrainingConfig, seq_len: int, *, cuda: bool = False, ranks: int = 1
) -> dict[str, float]:
    """Return the bytes of a process's peak saved by each other setting, the largest first, for rows
    of `seq_len` positions and `ranks` with different rows. Empty if the model's config.json lacks
    its shape.
    """
    device: Device = "cuda" if cuda else "cpu"
    try:
        shape = model_shape(config.lora_base or config.model)
        workload = Workload(row_length=seq_len)
        return savings_by_setting(shape, config, workload, device=device, ranks=ranks)
    except ModelFolderError:
        return {}


def advice(config: TrainingConfig, seq_len: int) -> str:
    """Return the same as a sentence for an error message, for this machine and its number of
    processes.
    """
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // config.tensor_parallel
    found = savings(config, seq_len, cuda=cuda, ranks=max(1, ranks))
    parts = [f"{name} would save about {gib(saved)}" for name, saved in found.items()]
    return f"with rows of {seq_len} positions, " + (
        ", ".join(parts) or "shorter rows would save most"
    )


logger = logging.getLogger("ttrl.training")


class Finite:
    """Finds the first non-finite loss of a step. Waits for the device only at the end."""

    def __init__(self) -> None:
        self._bad: list[Tensor] = []
        self._first: list[Tensor] = []

    def look(self, losses_N: Tensor) -> None:
        """Look at the losses of one more microbatch, N trained positions in row-major order."""
        bad_N = ~torch.isfinite(losses_N.detach())
        self._bad.append(bad_N.sum())
        self._first.append(bad_N.to(torch.int8).argmax() if len(bad_N) else bad_N.sum())

    def count(self) -> Tensor:
        """Return the number of non-finite losses so far, on this rank."""
        if self._bad:
            return torch.stack(self._bad).sum()
        return torch.zeros((), dtype=torch.int64)

    def described(self, rows: PackedTensors, row_numbers: list[int], size: int) -> str | None:
        """Describe the position of the first bad loss; None if all are finite. `rows` are the
        step's on this rank, `row_numbers` their numbers in the pack, `size` the rows of a
        microbatch."""
        if self._bad:
            counts = torch.stack(self._bad).tolist()
        else:
            counts = []
        for microbatch, count in enumerate(counts):
            if count:
                part = rows.rows(slice(microbatch * size, (microbatch + 1) * size))
                row, position = (
                    (part.labels != IGNORE).nonzero()[int(self._first[microbatch])].tolist()
                )
                sample = part.samples[int(part.sample_ids[row, position])]
                return (
                    f"the first is in microbatch {microbatch}, row "
                    f"{row_numbers[microbatch * size + row]}, position {position}, "
                    f"of task {sample.task_id!r}, sample {sample.sample}"
                )
        return None


class Skipped:
    """Counts skipped optimizer steps, and stops the run after too many in a row."""

    def __init__(self, most: int, in_a_row: int = 0) -> None:
        self._most = most
        self.in_a_row = in_a_row
        self.total = 0

    def taken(self) -> None:
        self.in_a_row = 0

    def skip(self, step: int, why: str, policy: Policy, ranks: Ranks) -> None:
        """Record step `step` (from 1) as skipped. A collective. Raises DivergedError after too
        many, or for non-finite weights: no later step can repair those."""
        self.in_a_row += 1
        self.total += 1
        trained = {name: p for name, p in policy.parameters_by_name().items() if p.requires_grad}
        broken = [name for name, p in trained.items() if not torch.isfinite(local_part(p)).all()]
        everywhere = torch.tensor([float(len(broken))], device=ranks.device)
        # Ranks with different parts of the same layers must reach the same decision.
        if ranks.sum_of_all(everywhere).item():
            raise DivergedError(
                f"optimizer step {step}: {why}, because weights of the model are not finite"
                f"{f' ({broken[0]} and {len(broken) - 1} more)' if broken else ''}; nothing was "
                "saved: start from an older "
                "checkpoint, or copy the model's files again"
            )
        if self.in_a_row > self._most:
            raise DivergedError(
                f"optimizer step {step}: {why}; it was skipped, like the {self.in_a_row - 1} "
                f"before it: more than max_skipped_steps ({self._most}) in a row. Nothing was "
                "saved; lower lr or max_grad_norm, or check the samples listed above"
            )
        logger.warning("optimizer step %d is skipped (%d in a row): %s", step, self.in_a_row, why)


def somewhere(first_bad: str | None, ranks: Ranks) -> str:
    """Return the description from the first rank with a bad loss. A collective."""
    return next(words for words in ranks.texts_of_each(first_bad or "") if words)


@contextlib.contextmanager
def memory_advice(config: TrainingConfig, seq_len: int) -> Iterator[None]:
    """Turn running out of memory into TrainerMemoryError, with each setting's possible savings."""
    try:
        yield
    except MemoryError as error:
        raise TrainerMemoryError(
            f"this process ran out of memory; {advice(config, seq_len)}"
        ) from error
    except RuntimeError as error:
        on_cuda = isinstance(error, torch.cuda.OutOfMemoryError)
        # PyTorch has no class of its own for it.
        if not on_cuda and "DefaultCPUAllocator" not in str(error):
            raise
        whose = "the GPU's" if on_cuda else "this machine's"
        first_line = str(error).strip().split("\n")[0]
        raise TrainerMemoryError(
            f"{whose} memory ran out ({first_line}); {advice(config, seq_len)}"
        ) from error

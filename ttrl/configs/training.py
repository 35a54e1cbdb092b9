"""What both recipes share: where, how fast, with which optimizer."""

from dataclasses import dataclass
from typing import Literal

from ttrl.configs.base import Config, at_least


@dataclass(kw_only=True)
class TrainingConfig(Config):
    """What both recipes share."""

    model: str
    """Folder of the model to start from, in Hugging Face layout."""
    output_dir: str
    """Where checkpoint/, state/ and train.jsonl are written."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the computation. Parameters, optimizer state and checkpoints are fp32 either way."""
    num_threads: int | None = None
    """CPU threads of each process; None leaves it to PyTorch. Part of what makes a run repeatable bit for bit."""
    seed: int = 0
    lr: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to `lr`."""
    total_steps: int | None = None
    """Where linear and cosine schedules reach zero, counted over the whole run."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Global norm to which gradients are clipped; None: not at all."""
    rows_per_microbatch: int = 4
    """Packed rows in one forward and backward pass on each rank. The update is the same for any value."""
    num_output_chunks: int = 4
    """Chunks in which the trained positions of a microbatch pass through the output projection: only one chunk's logits are ever
    held, three times in fp32 at the peak."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = at_least(1, rows_per_microbatch=self.rows_per_microbatch, num_output_chunks=self.num_output_chunks)
        found += at_least(1, num_threads=self.num_threads, total_steps=self.total_steps)
        found += at_least(0, lr=self.lr, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay, seed=self.seed)
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            found.append(f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or null for no clipping")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.eps <= 0:
            found.append(f"eps is {self.eps}; it must be above 0")
        if self.lr_schedule != "constant" and self.total_steps is None:
            found.append(f"lr_schedule {self.lr_schedule!r} needs total_steps")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            found.append(f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps})")
        return found

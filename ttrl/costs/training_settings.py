"""What decides about the memory of training, as plain values: the recipe's settings, and the rows that it is given."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_LAYER_MATRICES = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3")

HEAD_CHUNK = {"cpu": 128, "cuda": 1024}
"""Positions of a chunk of the head, where num_output_chunks is None; as in `ttrl.training.kernels.logprobs`."""


@dataclass(frozen=True)
class Settings:
    """Those of GRPOConfig that decide about memory, with its names and defaults."""

    dtype: str = "fp32"
    checkpoint_dtype: str = "fp32"
    optimizer: str = "adamw"
    optimizer_on_cpu: bool = False
    optimizer_in_backward: bool = False
    rows_per_microbatch: int = 4
    num_output_chunks: int | None = None
    activation_checkpointing: bool = False
    checkpoint_every: int = 1
    checkpoint_keeps: str = "nothing"
    activation_offloading: bool = False
    tensor_parallel: int = 1
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    updates_per_iteration: int = 1
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    token_rewards: str = "none"
    lora_rank: int | None = None
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = _LAYER_MATRICES
    lora_kind: str = "lora"
    lora_base_dtype: str = "fp32"
    lora_merge: bool = True

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
        """From a recipe's settings; what does not matter here is left aside."""
        known = {field.name for field in fields(cls)}
        chosen = {name: value for name, value in values.items() if name in known}
        if "lora_targets" in chosen:
            chosen["lora_targets"] = tuple(chosen["lora_targets"])
        return cls(**chosen)

    def head_chunk(self, positions: float, device: str) -> float:
        """How many of so many trained positions are in the head's largest chunk. device: "cpu" or "cuda"."""
        if self.num_output_chunks is None:
            return min(positions, HEAD_CHUNK[device])
        return -(-positions // self.num_output_chunks)

    @property
    def needs_reference(self) -> bool:
        """As GRPOConfig's."""
        return self.kl_coefficient > 0 or self.token_rewards == "implicit"

    @property
    def full_divergence(self) -> bool:
        """KL over the whole vocabulary."""
        return self.kl_coefficient > 0 and self.kl_estimator == "full"


@dataclass(frozen=True)
class Workload:
    """What one rank trains on in an iteration."""

    row_length: int
    """Positions of the longest row."""
    trained_share: float = 1.0
    """Labels, as a share of all positions."""
    rows: int = 1
    """Of this rank, in all."""
    microbatches: int = 2
    """In one optimizer step. From the second on, gradients of the ones before are there all the while."""
    continued: bool = True
    """An optimizer state is loaded: every iteration but a run's first."""
    longest_sample: int | None = None
    """In positions; None: as long as a row. Sliding windows that are longer than it change nothing."""

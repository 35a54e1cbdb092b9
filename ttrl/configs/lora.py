"""Adapters: what is trained where the model itself stays frozen. A part of both recipes' configs."""

from dataclasses import dataclass, field
from typing import Literal

from ttrl.configs.base import Config, at_least

LoRATarget = Literal["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3", "output"]

NF4_BLOCK = 64
"""Numbers that share a scale in a base that is held in 4 bits."""


def _every_layer_matrix() -> list[LoRATarget]:
    return ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


@dataclass(kw_only=True)
class LoRAConfig(Config):
    """A part of TrainingConfig. The formulas: `ttrl.training.policy.lora`."""

    lora_rank: int | None = None
    """Rank of the adapters; the base is frozen then, and only adapters have gradients, optimizer state and files of their own.
    None: no adapters, all parameters are trained."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Of the adapters' inputs, in passes with a gradient only; above 0, what is trained is not quite what samples."""
    lora_targets: list[LoRATarget] = field(default_factory=_every_layer_matrix)
    """Which matrices get adapters: attention's four, the feed-forward layer's w1 (gate), w2 (down) and w3 (up), and "output", the
    head. Those that a model does not have are passed over."""
    lora_kind: Literal["lora", "dora"] = "lora"
    """"dora" trains the length of each row of a matrix apart from its direction (arXiv 2402.09353)."""
    lora_base: str | None = None
    """Folder of the frozen base, where `model` is the checkpoint of an earlier iteration; None: the folder that its adapter
    names."""
    lora_base_dtype: Literal["fp32", "nf4"] = "fp32"
    """"nf4" holds the adapted matrices of the base in 4 bits (QLoRA, arXiv 2305.14314). One process."""
    lora_merge: bool = True
    """Checkpoints hold the merged model, ready to be served, with the adapter beside it in adapter/. False: the adapter alone."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        if self.lora_rank is None:
            plain = LoRAConfig()
            names = [name for name in vars(plain) if name != "lora_rank" and getattr(self, name) != getattr(plain, name)]
            return found + [f"{name} is {getattr(self, name)!r} without lora_rank" for name in names]
        found += at_least(1, lora_rank=self.lora_rank)
        if not self.lora_alpha > 0:
            found.append(f"lora_alpha is {self.lora_alpha}; it must be above 0")
        if not 0 <= self.lora_dropout < 1:
            found.append(f"lora_dropout is {self.lora_dropout}; it must be in [0, 1)")
        if not self.lora_targets:
            found.append("lora_targets is empty; nothing would be trained")
        if len(set(self.lora_targets)) < len(self.lora_targets):
            found.append(f"lora_targets names a matrix twice: {', '.join(self.lora_targets)}")
        return found + self._lora_excluded()

    def _lora_excluded(self) -> list[str]:
        """Settings of the whole config that adapters exclude."""
        found = []
        if self.lora_dropout > 0 and "output" in self.lora_targets:
            found.append(
                "lora_dropout with an adapter on 'output', which is merged in each pass and drops nothing: leave one out"
            )
        if getattr(self, "tensor_parallel", 1) > 1:
            found.append(
                "lora_rank with tensor_parallel; the frozen base has neither gradients nor optimizer state: shard it over more "
                "processes instead (FSDP2), with tensor_parallel 1"
            )
        if self.lora_base_dtype == "nf4":
            for name in ("compile", "cpu_offload"):
                if getattr(self, name, False):
                    found.append(f"lora_base_dtype 'nf4' with {name}; they do not work together: choose one")
            if "output" in self.lora_targets:
                found.append("lora_base_dtype 'nf4' with an adapter on 'output'; the head stays in fp32: leave it out")
        return found

    def lora_problems_here(self, processes: int) -> list[str]:
        """As TrainingConfig.problems_here, of the adapters."""
        if self.lora_base_dtype == "nf4" and processes > 1:
            return [f"lora_base_dtype is 'nf4', which is for one process, and there are {processes}; 'fp32' is sharded over them"]
        return []

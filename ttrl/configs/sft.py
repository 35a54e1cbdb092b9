"""The settings of `tune run ttrl/sft_recipe`."""

from dataclasses import dataclass

from ttrl.configs.base import at_least
from ttrl.configs.recipe import TrainingConfig
from ttrl.configs.watch import WatchConfig


@dataclass(kw_only=True)
class SFTConfig(WatchConfig, TrainingConfig):
    """One run of `tune run ttrl/sft_recipe`."""

    data: str
    """JSON lines, each {"messages": [...]}, and "tools": [...] where the assistant may call some. All turns of the assistant are
    trained."""
    steps: int
    """Optimizer steps."""
    batch_size: int = 64
    """Conversations in one optimizer step, over all ranks."""
    seq_len: int = 512
    """Length of a packed row, in tokens."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        return super().problems() + at_least(1, steps=self.steps, batch_size=self.batch_size, seq_len=self.seq_len)

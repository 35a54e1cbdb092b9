"""Settings of the data: advantages, what becomes of samples longer than a row, what is stored once."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ttrl.errors import ConfigError

AdvantageKind: TypeAlias = Literal["std", "mean", "leave_one_out", "batch"]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages. Raises ConfigError for values that make no sense."""

    kind: AdvantageKind = "std"
    """See the head of this module."""
    std_floor: float = 1e-6
    """Standard deviations are taken to be at least this, so that a group of nearly equal rewards is not blown up to the size of
    any other; of "std" and "batch" alone."""
    clip: float | None = None
    """Advantages are cut to [-clip, clip]; None: not at all."""
    reward_power: float = 1.0
    """Rewards become sign(r)·|r|^reward_power first."""
    surprise_bonus: float = 0.0
    """b of (1 - b)·r + b·r·s, the reward after that; s is the completion's mean -logp. 0: rewards as they are. Groups that are
    all right get a signal from it, however small; "std" makes it as large as any other's unless `std_floor` stops it."""
    surprise_until: str | None = None
    """The grader's metric that says up to which character of the answer s goes; None: up to the end."""

    def __post_init__(self) -> None:
        if found := self.problems():
            raise ConfigError("AdvantageConfig", found)

    def problems(self) -> list[str]:
        """What is wrong, one line each."""
        found = []
        if self.kind not in ("std", "mean", "leave_one_out", "batch"):
            found.append(f"kind is {self.kind!r}; choose 'std', 'mean', 'leave_one_out' or 'batch'")
        if not (math.isfinite(self.std_floor) and self.std_floor > 0):
            found.append(f"std_floor is {self.std_floor}; it must be above 0")
        if self.clip is not None and not self.clip > 0:
            found.append(f"clip is {self.clip}; it must be above 0, or null for no clipping")
        if not (math.isfinite(self.reward_power) and self.reward_power > 0):
            found.append(f"reward_power is {self.reward_power}; it must be above 0")
        if not 0 <= self.surprise_bonus <= 1:
            found.append(f"surprise_bonus is {self.surprise_bonus}; it must be in [0, 1]")
        if self.surprise_until is not None and self.surprise_bonus == 0:
            found.append(f"surprise_until is {self.surprise_until!r} without a surprise_bonus; they go together")
        return found


TooLong: TypeAlias = Literal["drop", "error", "truncate", "extend"]


Share: TypeAlias = Literal["tree", "prompt", "none"]

"""Define the settings of the data: advantages, samples longer than a row, and data stored once."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ttrl.errors import ConfigError

AdvantageKind: TypeAlias = Literal["std", "mean", "leave_one_out", "batch"]
TooLong: TypeAlias = Literal["drop", "error", "truncate", "extend"]
Share: TypeAlias = Literal["tree", "prompt", "none"]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages. Raises ConfigError for values that make no sense.

    >>> AdvantageConfig(kind="leave_one_out", clip=5.0).std_floor
    1e-06
    """

    kind: AdvantageKind = "std"
    """A row of the table in `ttrl.data.advantages`."""
    std_floor: float = 1e-6
    """The smallest standard deviation to divide by, so that nearly equal rewards do not weigh as
    much as others.
    """
    clip: float | None = None
    """Advantages are clipped to [-clip, clip]; None: no clipping."""
    reward_power: float = 1.0
    """Rewards first become sign(r)·|r|^reward_power."""
    surprise_bonus: float = 0.0
    """b: rewards then become (1 - b)·r + b·r·s, where s is the completion's mean -logp in nats.
    Groups in which every answer is correct get a signal from it, however small; "std" makes it as
    large as any other's unless `std_floor` prevents that.
    """
    surprise_until: str | None = None
    """The grader's metric that says up to which character of the answer s is taken; None: up to the
    end.
    """

    def __post_init__(self) -> None:
        found = self.problems()
        if found:
            raise ConfigError("AdvantageConfig", found)

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = []
        if self.kind not in get_args(AdvantageKind):
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
            found.append(
                f"surprise_until is {self.surprise_until!r} without a surprise_bonus; they go "
                "together"
            )
        return found

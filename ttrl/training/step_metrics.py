"""Sum a training step's metrics over microbatches and ranks."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from ttrl.training.parallel.distributed import Ranks


class Sums:
    """Named sums over microbatches, in float64, added up over the ranks at the end."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, Tensor | float] = defaultdict(float)

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self._sums[name] += (
                value.detach().double().sum() if isinstance(value, Tensor) else value
            )

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """Return the totals over all ranks, on every rank; a collective. All ranks must have added
        the same names.
        """
        names = sorted(self._sums)
        values = torch.tensor(
            [float(self._sums[name]) for name in names], dtype=torch.float64, device=ranks.device
        )
        return dict(zip(names, ranks.sum(values).tolist(), strict=True))


class Range:
    """The smallest and the largest of all values, over microbatches and ranks."""

    def __init__(self) -> None:
        self._both: Tensor | None = None

    def add(self, values_N: Tensor) -> None:
        """Add values; there may be none."""
        if len(values_N):  # on their device only: moving anything would wait for it
            low, high = values_N.detach().float().aminmax()
            both = torch.stack([-low, high])
            if self._both is None:
                self._both = both
            else:
                self._both = torch.maximum(self._both, both)

    def over_ranks(self, ranks: Ranks) -> tuple[float, float]:
        """Return (smallest, largest) on every rank; a collective. (inf, -inf) if there was no
        value.
        """
        if self._both is None:
            both = torch.full((2,), -math.inf)
        else:
            both = self._both
        low, high = ranks.gather(both).view(-1, 2).amax(dim=0).tolist()
        return -low, high


def effective_sample_size(
    weight_sum: float, weight_square_sum: float, count: float
) -> float | None:
    """Return (Σw)²/Σw² as a share of `count`, from the sums; None if nothing was summed."""
    if count and weight_square_sum > 0:
        return weight_sum**2 / weight_square_sum / count
    return None

"""Split the momentum's part of a step by the age of its gradients.

The momentum after T steps is m_T = Σ_k d^(T - k)·c·g_k, with the decay d (β₁ of AdamW). The
gradients are gone, but a run keeps the momentum after each iteration, and of two of them

    m_T - d^(T - S)·m_S = Σ_{k = S+1…T} d^(T - k)·c·g_k

are the steps in between. For a quantity linear in m, such as ⟨∇H, v⟩, the products with the kept
momenta are enough: none is held in memory. The parts telescope, so their sum is exact.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ttrl.instruments.fisher import dot

OLDEST = 0.01
"""Steps with a smaller part of their gradient in the momentum are not looked up: with β₁ = 0.9,
those of more than 44 steps ago."""


@dataclass(frozen=True)
class Age:
    """Hold the part of some earlier steps. 1 is the step before the studied one."""

    newest: int
    oldest: int | None
    """None: all steps before, together."""
    value: float


def by_age(products: Sequence[tuple[int, float]], decay: float) -> list[Age]:
    """Return the parts of the last product, newest first.

    products: (steps taken, product with the momentum then), oldest first; the last is the momentum
    before the studied step. decay: d.
    """
    ages: list[Age] = []
    now = products[-1][0]
    for (before, earlier), (after, later) in itertools.pairwise(products):
        own = later - decay ** (after - before) * earlier
        ages.append(Age(now - after + 1, now - before, decay ** (now - after) * own))
    first, oldest = products[0]
    if first:
        ages.insert(0, Age(now - first + 1, None, decay ** (now - first) * oldest))
    return ages[::-1]


def ages(
    weights: Mapping[str, Tensor],
    momenta: Sequence[Mapping[str, Tensor]],
    moment: str,
    state: str | None,
    taken: int,
    decay: float,
) -> list[Age]:
    """Split ⟨weights, m⟩ by age, m the momentum after `taken` steps, before the studied one.

    momenta: those in memory, newest first, a step apart; m is the first. moment: its name in
    states. state: the folder with the state at the iteration's start, for earlier ones. decay: d.
    """
    kept, is_all = kept_momenta(state, list(weights), moment, taken, decay)
    products = {one.steps: one.product(weights) for one in kept}
    if is_all:
        products[0] = 0.0
    for back, momentum in enumerate(momenta):
        products[taken - back] = dot(weights, momentum)
    return by_age(sorted(products.items()), decay)


class KeptMomentum:
    """The momentum after an earlier iteration, in the file of its optimizer's state."""

    def __init__(self, folder: Path, names: Sequence[str], moment: str) -> None:
        """Raises OSError, KeyError or SafetensorError if it is not there, or not as numbers."""
        self._path = folder / "optimizer.safetensors"
        self._names = names
        self._moment = moment
        with safe_open(self._path, framework="pt") as file:
            for name in names:
                parts = file.get_slice(f"{name}.{self._moment}").get_dtype()
                if parts not in ("F32", "F64"):
                    raise KeyError(f"{name}.{moment} is of {parts}")
            stored = set(file.keys())
            counts = [f"{name}.step" for name in names if f"{name}.step" in stored]
            steps = [int(file.get_tensor(name)) for name in counts]
        # SGD counts none: those of the run.
        self.steps = max(steps) if steps else _global_step(folder)

    def product(self, weights: Mapping[str, Tensor]) -> float:
        """Return ⟨weights, m⟩. One tensor is read at a time."""
        total = 0.0
        with safe_open(self._path, framework="pt") as file:
            for name in self._names:
                moment = file.get_tensor(f"{name}.{self._moment}").reshape(weights[name].shape)
                total += float((weights[name] * moment.to(weights[name])).sum(dtype=torch.float64))
        return total


def kept_momenta(
    state: str | None, names: Sequence[str], moment: str, now: int, decay: float
) -> tuple[list[KeptMomentum], bool]:
    """Return the momenta before an iteration, oldest first, and whether none is missing before the
    first: of `state`, the state at its start, and of the iterations before, as far as their states
    are there and count (OLDEST). moment: the momentum's name there. now: steps taken before the
    studied one.
    """
    found: list[KeptMomentum] = []
    for folder in _states(state):
        try:
            one = KeptMomentum(folder, names, moment)
        except (OSError, KeyError, ValueError, SafetensorError):
            return found, False
        found.insert(0, one)
        if decay ** (now - one.steps) < OLDEST:
            return found, False
    return found, True


def _global_step(folder: Path) -> int:
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["global_step"])


def _states(state: str | None) -> Iterator[Path]:
    """Yield the states of a run, newest first: each iteration's settings name the one before."""
    seen = set()
    while state is not None and state not in seen:
        seen.add(state)
        folder = Path(state)
        yield folder
        settings = folder.parent / "grpo.yaml"
        if not settings.is_file():
            # An iteration without settings began somewhere, too.
            yield folder.parent / "unknown"
            return
        values: Any = OmegaConf.load(settings)
        state = values.get("state")

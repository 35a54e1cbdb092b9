"""Split the momentum's part of a step by the age of its gradients.

The momentum after T steps is m_T = Σ_k d^(T - k)·c·g_k, with the decay d (β₁ of AdamW). The
gradients are gone, but a run keeps the momentum after each iteration, and of two of them

    m_T - d^(T - S)·m_S = Σ_{k = S+1…T} d^(T - k)·c·g_k

are the steps in between. For a quantity linear in m, such as ⟨∇H, v⟩, the products with the kept
momenta are enough: none is held in memory. The parts telescope, so their sum is exact.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ttrl.instruments.fisher import dot
from ttrl.system.files import read_object

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
    products, is_all = kept_products(state, weights, moment, taken, decay)
    if is_all:
        products[0] = 0.0
    for back, momentum in enumerate(momenta):
        products[taken - back] = dot(weights, momentum)
    return by_age(sorted(products.items()), decay)


def kept_product(folder: Path, weights: Mapping[str, Tensor], moment: str) -> tuple[int, float]:
    """Return the steps taken up to an optimizer's state, and ⟨weights, m⟩ with its momentum. One
    tensor is read at a time. Raises OSError, KeyError or SafetensorError if the momentum is not
    there, or not as numbers.
    """
    total = 0.0
    with safe_open(folder / "optimizer.safetensors", framework="pt") as file:
        stored = set(file.keys())
        counts = [f"{name}.step" for name in weights if f"{name}.step" in stored]
        steps = [int(file.get_tensor(name)) for name in counts]
        for name, weight in weights.items():
            parts = file.get_slice(f"{name}.{moment}").get_dtype()
            if parts not in ("F32", "F64"):
                raise KeyError(f"{name}.{moment} is of {parts}")
            momentum = file.get_tensor(f"{name}.{moment}").reshape(weight.shape)
            total += float((weight * momentum.to(weight)).sum(dtype=torch.float64))
    if not steps:  # SGD counts none: those of the run
        steps = [int(read_object(folder / "state.json")["global_step"])]
    return max(steps), total


def kept_products(
    state: str | None, weights: Mapping[str, Tensor], moment: str, now: int, decay: float
) -> tuple[dict[int, float], bool]:
    """Return ⟨weights, m⟩ by steps taken, for the momenta before an iteration, and whether none is
    missing: of `state`, the state at its start, and of the iterations before, as far as their
    states are there and count (OLDEST). moment: the momentum's name there. now: steps taken before
    the studied one.
    """
    found: dict[int, float] = {}
    for folder in _states(state):
        try:
            steps, product = kept_product(folder, weights, moment)
        except (OSError, KeyError, ValueError, SafetensorError):
            return found, False
        found[steps] = product
        if decay ** (now - steps) < OLDEST:
            return found, False
    return found, True


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

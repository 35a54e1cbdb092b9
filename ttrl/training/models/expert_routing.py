"""Replay the sampler's experts, and measure the routers' choices.

A router of transformers scores all experts of each token and chooses by `torch.topk`. While a
router runs, a mode of torch sees these calls. It replaces the router's choice by the sampler's
experts and takes their scores: gradients still flow into the router. Tokens without the sampler's
experts keep the router's choice.

Rounding flips close choices; the trainer then computes another network than the sampler did. Source
of the method: Rollout Routing Replay (arXiv:2510.11370).

Shapes: B rows, T tokens, N = B·T, L layers, K experts of a token, E experts. Has never run on a
GPU.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ttrl.errors import UserError
from ttrl.facts import RouterFigures

_SCORES = frozenset({torch.softmax, F.softmax, Tensor.softmax, torch.sigmoid, Tensor.sigmoid})
_CHOICES = frozenset({torch.topk, Tensor.topk})
_NAMES = ("gate", "router")


class PackedRows(Protocol):
    """The rows of a pass, as routing needs them."""

    experts: Tensor | None
    """[B, T, L, K], -1 for unknown."""

    @property
    def is_token(self) -> Tensor:
        """[B, T], False in padding."""


class Chosen(NamedTuple):
    """Stands for the result of `torch.topk`, [N, K] each."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class LayerRouting:
    """A layer's routing of one step's tokens."""

    layer: int
    entropy: float
    """Of a token's scores over all experts, nats; mean over tokens."""
    load: list[float]
    """Each expert's share of all choices."""
    replayed: float
    """Share of tokens with the sampler's experts."""
    differing: float
    """Of those, the share with another choice by the router itself."""


def routing_metrics(layers: list[LayerRouting]) -> RouterFigures:
    """Return the router metrics for train.jsonl."""
    return RouterFigures(
        layers=[one.layer for one in layers],
        entropy=[one.entropy for one in layers],
        largest_load=[max(one.load) for one in layers],
        unused=[sum(share == 0 for share in one.load) for one in layers],
        replayed=sum(one.replayed for one in layers) / len(layers),
        differing=sum(one.differing for one in layers) / len(layers),
    )


class Routing:
    """The routers of a decoder."""

    def __init__(self, layers: nn.ModuleList, rows: Callable[[], PackedRows | None]) -> None:
        """Hook into the routers. rows: returns those of the current pass."""
        self._rows = rows
        self._facts: dict[int, Tensor] = {}
        self._modes: list[_Choice] = []
        self.experts = 0
        """How many experts a router chooses from."""
        self.layers: list[int] = []
        """Numbers of the layers with a router."""
        for number, layer in enumerate(layers):
            for block in layer.modules():
                router = _router_of(block)
                if router is not None:
                    experts: Any = block.experts
                    self.layers.append(number)
                    self.experts = experts.num_experts
                    self._watch(router, number, experts.num_experts)

    def _watch(self, router: nn.Module, layer: int, experts: int) -> None:
        def begin(module: nn.Module, given: Any) -> None:
            rows = self._rows()
            if rows is not None:
                mode = _Choice(rows, layer, experts)
                self._modes.append(mode)
                mode.open.enter_context(mode)

        def end(module: nn.Module, given: Any, out: Any) -> None:
            if self._modes:
                mode = self._modes.pop()
                mode.open.close()
                if out is not None:  # else the router raised
                    self._add(mode, type(module).__name__)

        router.register_forward_pre_hook(begin)
        router.register_forward_hook(end, always_call=True)

    def _add(self, mode: "_Choice", router: str) -> None:
        if mode.facts is None and mode.rows.experts is not None:
            raise UserError(
                f"router_replay: {router} does not choose experts by torch.topk; set "
                "router_replay=False"
            )
        if mode.facts is not None:
            before = self._facts.get(mode.layer)
            self._facts[mode.layer] = mode.facts if before is None else before + mode.facts

    def forget(self) -> None:
        """Forget the routing so far."""
        self._facts.clear()

    def take(self, add_up: Callable[[Tensor], Tensor]) -> list[LayerRouting]:
        """Return the routing since the last call. add_up: sums a tensor over all ranks."""
        facts = self._facts
        self._facts = {}
        found = []
        for layer, sums in sorted(facts.items()):
            entropy, tokens, known, differing, *load = add_up(sums).tolist()
            total = sum(load) or 1.0
            share = [count / total for count in load]
            found.append(
                LayerRouting(
                    layer,
                    entropy / max(tokens, 1),
                    share,
                    known / max(tokens, 1),
                    differing / max(known, 1),
                )
            )
        return found


def _router_of(block: nn.Module) -> nn.Module | None:
    """Return the router of a block of experts; None for other modules."""
    if not hasattr(getattr(block, "experts", None), "num_experts"):
        return None
    routers = [
        getattr(block, name) for name in _NAMES if isinstance(getattr(block, name, None), nn.Module)
    ]
    return routers[0] if routers else None


class _Choice(TorchFunctionMode):
    """Sees the choice of one router in one pass."""

    def __init__(self, rows: PackedRows, layer: int, experts: int) -> None:
        super().__init__()
        self.rows = rows
        self.layer = layer
        self._experts = experts
        self.open = ExitStack()
        """Holds this mode while the router runs."""
        self._scores_NE: Tensor | None = None
        self.facts: Tensor | None = None
        """[4 + E]: sums of entropies, tokens, tokens with known experts, of those with other ones
        than the router's, and the choices of each expert."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _SCORES and out.shape[-1] == self._experts:
            self._scores_NE = out
        if func in _CHOICES:
            given = args[0] if args else kwargs["input"]
            # Else groups of experts are chosen.
            if given.dim() == 2 and given.shape[-1] == self._experts:
                return self._choose(given, out[0], out[1])
        return out

    def _choose(self, given_NE: Tensor, values_NK: Tensor, own_NK: Tensor) -> Chosen:
        chosen_NK = own_NK
        known_N = torch.zeros_like(own_NK[:, 0], dtype=torch.bool)
        if self.rows.experts is not None:
            told_BTK = self.rows.experts[:, :, self.layer]
            if told_BTK.shape[-1] != own_NK.shape[-1]:
                counts = (
                    f"{told_BTK.shape[-1]} experts of each token, but layer {self.layer} chooses "
                    f"{own_NK.shape[-1]}"
                )
                raise UserError(
                    f"router_replay: the pack holds {counts}; use the model of the pack"
                )
            told_NK = told_BTK.reshape(own_NK.shape).long()
            known_N = (told_NK >= 0).all(-1)
            chosen_NK = torch.where(known_N[:, None], told_NK, own_NK)
            values_NK = given_NE.gather(-1, chosen_NK)
        with torch.no_grad():
            self._count(given_NE, own_NK, chosen_NK, known_N)
        return Chosen(values_NK, chosen_NK)

    def _count(self, given_NE: Tensor, own_NK: Tensor, chosen_NK: Tensor, known_N: Tensor) -> None:
        if self._scores_NE is not None:
            scores_NE = self._scores_NE
        else:
            scores_NE = given_NE.softmax(-1)
        shares_NE = scores_NE.double() / scores_NE.double().sum(-1, keepdim=True)
        entropy_N = torch.special.entr(shares_NE).sum(-1)
        token_N = self.rows.is_token.flatten().double()
        known_N = known_N * token_N
        differs_N = (own_NK.sort(-1).values != chosen_NK.sort(-1).values).any(-1)
        load_E = token_N.new_zeros(self._experts)
        load_E.index_add_(0, chosen_NK.flatten(), token_N.repeat_interleave(chosen_NK.shape[-1]))
        sums = [
            (entropy_N * token_N).sum(),
            token_N.sum(),
            known_N.sum(),
            (differs_N * known_N).sum(),
        ]
        self.facts = torch.cat([torch.stack(sums), load_E])

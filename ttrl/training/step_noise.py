"""Collect the inputs of the gradient noise scale during a step's backward pass. The mathematics:
`ttrl.instruments.gradient_noise`.

Two things are measured in the one backward pass:

    pieces    |h_j|² of each microbatch's gradient on each rank, by a hook on every parameter,
              before the gradient is added to the others; on a rank of FSDP2 this is its own, before
              gradients are summed over ranks
    sketch    each sample's gradient with respect to imaginary linear layers on the hidden states
              after the decoder's first layer and in its middle, Σ_t δ_t h_tᵀ over its labels, h
              normed as in the next layer, each projected to SKETCH × SKETCH numbers at random:
              E|projected|² = |x|². A sample's effect on the gradient at the prompt's positions is
              left out: it cannot be separated by sample there

The sketch only divides the noise between prompts and samples; after the top layer it would be
wrong, and call twice as much of it noise between samples. In 1,024 batches of the quickstart it
found 0.22 of the noise between samples; redrawn batches say 0.26. S/|G|² was 0.9 times as large
(tools/check_noise.py); a few groups weigh so much in either figure that 1,024 batches leave a
factor of two. A norm reads each gradient once, little next to the products behind it; `seconds`
says how much (on a GPU, of the launching CPU's time). For a very small microbatch, of 100 tokens
and a model of a million parameters, it takes 5 to 7% of the microbatch.

Shapes: B rows, T tokens, N trained positions of a microbatch, D width, S samples, L lines (one for
each sample of each microbatch), d depths, r and q = SKETCH. Has run on CPU, in one process and over
gloo, and on one GPU.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ttrl.configs import GRPOConfig
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.parallel.sharding import fsdp_parameters, local_part
from ttrl.training.policy.policy import Policy

SKETCH = 16
# Σ/σ_s in (6): beyond, one sample has most of the variance, and to leave it out is no small change.
_MOST_RATIO = 2.0
_ENDS = ((-torch.inf, "amax"), (torch.inf, "amin"))
_BLOCKS = 4  # the most groups of layers


class GradientPieces:
    """Watches the gradients of one optimizer step at a time, on all ranks alike."""

    def __init__(
        self,
        policy: Policy,
        config: GRPOConfig,
        here: Ranks,
        projections: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """projections: of every step, left and right [d, D, r]; default: drawn in each step."""
        self._here = here
        self._policy = policy
        self._parameters = {
            name: p for name, p in policy.parameters_by_name().items() if p.requires_grad
        }
        own = _layer_groups(list(self._parameters), len(policy.decoder.layers))
        self.groups = list(dict.fromkeys(own))
        self._group_of = [self.groups.index(group) for group in own]
        self._slots = {name: number for number, name in enumerate(self._parameters)}
        self._norms: list[dict[int, Tensor]] = []
        self._lines: list[tuple[Tensor, Tensor, Tensor]] = []
        self._depths = {
            number: place
            for place, number in enumerate(sorted({0, len(policy.decoder.layers) // 2}))
        }
        self._hooks: list[Any] = []
        self._alone = False
        self._fixed = projections
        self._projections = projections
        self._seed = (config.seed, "gradient noise")
        self.seconds = 0.0

    def begin(self, global_step: int, microbatches: int) -> None:
        """Forget the step before, and set the next one's number of microbatches on each rank. The
        sketch's projections are new in each step, to keep averages over steps unbiased."""
        self._projections = self._fixed or self._drawn(global_step)
        self._norms.clear()
        self._lines.clear()
        self._alone = microbatches * self._here.world_size == 1
        self.seconds = 0.0

    def _drawn(self, global_step: int) -> tuple[Tensor, Tensor]:
        width = self._policy.decoder.tok_embeddings.embedding_dim
        generator = derived_generator(*self._seed, global_step)
        drawn = torch.randn(2, len(self._depths), width, SKETCH, generator=generator) / SKETCH**0.5
        left, right = drawn.to(self._here.device)
        return left, right

    def piece(self) -> None:
        """Begin a microbatch. Call it between forward and backward pass: FSDP has made its whole
        parameters by then.
        """
        self._norms.append({})
        if not self._hooks and not self._alone:
            self._hooks = [
                leaf.register_hook(self._seen(self._slots[name])) for name, leaf in self._leaves()
            ]

    def watch_layers(
        self,
        keys: Tensor,
        sample_ids_N: Tensor,
        weights_N: Tensor,
        advantages_N: Tensor,
        trained_N: Tensor,
    ) -> Callable[[int, Tensor], None]:
        """Return a callback for a microbatch's forward pass; it takes each layer's number and
        output hidden states [B, T, D]. keys: (task, sample) of each sample; trained: the label
        positions, rows laid end to end.
        """
        device = weights_N.device
        of_samples_S2 = torch.zeros(len(keys), 2, dtype=torch.float64, device=device)
        of_samples_S2[:, 0].index_add_(0, sample_ids_N, weights_N.double())
        # Of any token: they differ when critics are trained.
        of_samples_S2[sample_ids_N, 1] = advantages_N.double()
        # Each depth's numbers are contiguous: adding to them is 40 times as fast.
        assert self._projections is not None
        left, right = self._projections
        numbers = left.shape[-1] * right.shape[-1]
        sums_dSr = torch.zeros(len(self._depths), len(keys), numbers, device=device)
        piece = torch.full_like(keys[:, :1], len(self._norms))
        self._lines.append((torch.cat([piece, keys], dim=1), of_samples_S2, sums_dSr))

        def watch(number: int, h_BTD: Tensor) -> None:
            if number not in self._depths or not h_BTD.requires_grad:
                return
            began = time.perf_counter()
            depth = self._depths[number]
            with torch.no_grad(), torch.autocast(h_BTD.device.type, enabled=False):
                h_ND = h_BTD.detach().flatten(0, 1).index_select(0, trained_N).float()
                seen_Nr = (
                    h_ND
                    @ right[depth]
                    * (right.shape[1] ** 0.5 / torch.linalg.vector_norm(h_ND, dim=1, keepdim=True))
                )

            @torch.no_grad()
            def note(gradient_BTD: Tensor) -> None:
                began = time.perf_counter()
                gradient_ND = gradient_BTD.flatten(0, 1).index_select(0, trained_N).float()
                outer_N = torch.einsum("nr,nq->nrq", gradient_ND @ left[depth], seen_Nr).flatten(1)
                sums_dSr[depth].index_add_(0, sample_ids_N, outer_N)
                self.seconds += time.perf_counter() - began

            h_BTD.register_hook(note)
            self.seconds += time.perf_counter() - began

        return watch

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Return the measurements, the same on every rank: of pieces their `shares` f_j of the
        weights in the loss, `squares` |h_j|² and of all `whole` |g|², by group of layers; of
        samples `counts`, `within`, `alike`, `between`, `mean`, `split`
        (`ttrl.instruments.gradient_noise`). A collective. Call it before gradients are clipped.
        """
        began = time.perf_counter()
        here = self._here
        pieces = len(self._norms)
        # FSDP takes the mean over ranks; `Update.backward` multiplied by their number.
        scale = 1 / here.world_size
        gradients = {
            self._slots[name]: p.grad
            for name, p in self._parameters.items()
            if p.grad is not None and not self._alone
        }
        squares = self._by_group(self._norms) * scale**2
        whole = self._by_group([{slot: _norm(grad) for slot, grad in gradients.items()}])[0]
        whole = here.sum(whole.to(here.device)).cpu()
        who = torch.cat([who.cpu() for who, _, _ in self._lines])
        who[:, 0] += here.rank * pieces
        seen = torch.cat(
            [
                torch.cat([known, sums.transpose(0, 1).flatten(1)], dim=1).cpu()
                for _, known, sums in self._lines
            ]
        )
        who, seen = (here.gather(part.flatten()).view(-1, part.shape[1]) for part in (who, seen))
        seen[:, 2:] *= scale
        found = {
            "layers": self.groups,
            "squares": here.gather(squares.flatten()).view(-1, len(self.groups)).tolist(),
            "whole": whole.tolist(),
            **_moments(who, seen, pieces * here.world_size),
        }
        return found | {"seconds": self.seconds + time.perf_counter() - began}

    def close(self) -> None:
        """Take all hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _seen(self, slot: int) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:  # without gradient, as all of a backward pass
            began = time.perf_counter()
            self._norms[-1][slot] = _norm(gradient)
            self.seconds += time.perf_counter() - began

        return note

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yield autograd's gradient leaves: with FSDP2, whole parameters, made by the first forward
        pass and refilled by later ones."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        if not any(isinstance(module, FSDPModule) for module in self._policy.modules()):
            yield from self._parameters.items()
        for one in fsdp_parameters(self._policy):
            if id(one.sharded_param) in names:
                yield names[id(one.sharded_param)], one._unsharded_param

    def _by_group(self, norms: Sequence[Mapping[int, Tensor]]) -> Tensor:
        """Square and add up norms, given by the numbers of their parameters: [pieces, groups],
        float64, on the CPU.
        """
        sums = torch.zeros(len(norms), len(self.groups), dtype=torch.float64)
        values = [norm for piece in norms for norm in piece.values()]
        if values:
            places = [
                row * len(self.groups) + self._group_of[slot]
                for row, piece in enumerate(norms)
                for slot in piece
            ]
            sums.view(-1).index_add_(
                0, torch.tensor(places), torch.stack(values).cpu().double().square()
            )
        return sums


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(local_part(gradient), dtype=torch.float32)
    return norm


def _layer_groups(names: Sequence[str], layers: int) -> list[str]:
    """Return each parameter's group of layers: embeddings, head, and parts of the decoder."""
    size = -(-layers // _BLOCKS)
    found = []
    for name in names:
        if name.startswith("layers."):
            first = int(name.split(".")[1]) // size * size
            last = min(first + size, layers) - 1
            found.append(f"layer {first}" if first == last else f"layers {first}-{last}")
        else:
            found.append(
                "embeddings" if name.startswith(("tok_embeddings", "pos_embeddings")) else "head"
            )
    return found


def _moments(who_L3: Tensor, seen: Tensor, pieces: int) -> dict[str, Any]:
    """Return the values of `finish` about shares and samples. who: (piece, task, sample) of each
    line; seen: its weight in the loss, its advantage, and its part of the sketched gradient."""
    shares = torch.zeros(pieces, dtype=torch.float64).index_add_(0, who_L3[:, 0], seen[:, 0])
    samples, place_L = torch.unique(who_L3[:, 2], return_inverse=True)
    count = len(samples)
    x = (
        torch.zeros(count, seen.shape[1] - 2, dtype=torch.float64).index_add_(
            0, place_L, seen[:, 2:]
        )
        * count
    )
    advantages = torch.zeros(count, dtype=torch.float64).scatter_(0, place_L, seen[:, 1])
    tasks = torch.empty_like(samples).scatter_(0, place_L, who_L3[:, 1])
    _, task_S, counts = torch.unique(tasks, return_inverse=True, return_counts=True)
    means = (
        torch.zeros(len(counts), x.shape[1], dtype=torch.float64).index_add_(0, task_S, x)
        / counts[:, None]
    )
    mean = x.mean(dim=0)
    _, together = torch.unique(who_L3[:, 0] * len(counts) + task_S[place_L], return_counts=True)
    return {
        "shares": (shares / shares.sum()).tolist(),
        "counts": counts.tolist(),
        "within": _within(x, means, task_S, advantages),
        "alike": _alike(x, means, task_S, advantages),
        "between": float((counts * (means - mean).square().sum(dim=1)).sum()),
        "mean": float(mean.square().sum()),
        "split": float(together.square().sum() / counts.square().sum()),
    }


def _within(x: Tensor, means: Tensor, task_S: Tensor, advantages: Tensor) -> float:
    """Return the scatter of samples within tasks, (4); of pseudo-values, (6), if advantages have
    unit length.
    """

    def of_task(values: Tensor) -> Tensor:
        return torch.zeros(len(means), *values.shape[1:], dtype=values.dtype).index_add_(
            0, task_S, values
        )

    counts = of_task(torch.ones_like(advantages))
    spread = of_task(advantages.square()) / counts - (of_task(advantages) / counts).square()
    if not _have_unit_length(advantages, task_S):
        return float((x - means[task_S]).square().sum())
    c = counts[task_S]
    total, squares = (of_task(power)[task_S] for power in (advantages, advantages.square()))
    others = (c - 1).clamp(min=1)
    left = (squares - advantages.square()) / others - ((total - advantages) / others).square()
    ratio = torch.where(
        left > 1e-6, (spread[task_S] / left.clamp(min=1e-6)).sqrt().clamp(max=_MOST_RATIO), 0.0
    )
    pseudo = torch.where(c > 2, ratio, 1.0)[:, None] * (c[:, None] * means[task_S] - x)
    return float((pseudo - (of_task(pseudo) / counts[:, None])[task_S]).square().sum())


def _have_unit_length(advantages: Tensor, task_S: Tensor) -> bool:
    """Tell whether advantages, of mean 0 in each task, are divided by their rms there."""
    squares = torch.zeros(int(task_S.max()) + 1, dtype=advantages.dtype).index_add_(
        0, task_S, advantages.square()
    )
    return float(((squares / torch.bincount(task_S) - 1).abs() < 1e-3).double().mean()) >= 0.9


def _alike(x: Tensor, means: Tensor, task_S: Tensor, advantages: Tensor) -> dict[str, Any] | None:
    """Return the inputs of (7) for rewards with two values, by task: n, Σ|x|² and |Σx|² of the
    samples with the higher and of those with the lower one, and |m|²."""
    ends = (
        torch.full((len(means),), bound, dtype=x.dtype).scatter_reduce(0, task_S, advantages, how)
        for bound, how in _ENDS
    )
    high, low = (end[task_S] for end in ends)
    is_low, is_high = ((advantages - end).abs() <= 1e-4 * (high - low) for end in (low, high))
    if not bool((is_low | is_high).all()):
        return None
    facts = torch.cat([torch.ones_like(x[:, :1]), x.square().sum(dim=1, keepdim=True), x], dim=1)
    found = []
    for chosen in (is_high & ~is_low, is_low):
        sums = torch.zeros(len(means), facts.shape[1], dtype=x.dtype).index_add_(
            0, task_S[chosen], facts[chosen]
        )
        found.append(torch.cat([sums[:, :2], sums[:, 2:].square().sum(dim=1, keepdim=True)], dim=1))
    lengths = means.square().sum(dim=1, keepdim=True)
    return {
        "unit": _have_unit_length(advantages, task_S),
        "tasks": torch.cat([*found, lengths], dim=1).tolist(),
    }

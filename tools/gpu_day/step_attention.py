"""Step 8: attention over packed rows in the shapes of Qwen2.5-1.5B, several ways.

    expanded     what ttrl computes: FlexAttention, keys and values laid out for each query head
    grouped      FlexAttention with as many heads of keys as the model has
    tuned …      expanded, with other tiles in FlexAttention's kernels
    varlen       PyTorch's variable-length FlashAttention, each sample with a prompt of its own
    varlen, FA3  the same by vLLM's FlashAttention 3, which has no backward pass

The masks are gsm8k's (a row of 8,192: prompts of 150 tokens, eight answers of 300) and one of 16k
(a prompt of 8,192, eight answers of 1,024). Milliseconds are for the same samples, so they compare.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from measure import seconds_of
from steps import Place
from torch import Tensor

from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.kernels.attention import (
    AttentionPlan,
    attend_trees,
    attention_plan,
    compiled_flex,
    flex_attend,
)

HEADS = 12
KV_HEADS = 2
WIDTH = 128
GROUP = 8
Tiles = tuple[int, int, int, int]
"""Rows and columns of a tile, stages, warps."""
COLUMNS = ["mask", "way", "forward, ms", "forward and backward, ms"]


@dataclass(frozen=True)
class Mask:
    """Describe a row: its length, and the tokens of prompts and answers in it."""

    name: str
    length: int
    prompt: int
    answer: int


MASKS = [Mask("gsm8k", 8192, 150, 300), Mask("16k", 16384, 8192, 1024)]
SMALL = [Mask("gsm8k", 256, 15, 12), Mask("16k", 256, 128, 16)]
TILES: list[Tiles] = [(128, 64, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (128, 32, 4, 8)]
BACKWARD_TILES: list[Tiles] = [(64, 128, 2, 8), (64, 64, 2, 8), (32, 128, 3, 4), (64, 128, 3, 8)]


@dataclass(frozen=True)
class Inputs:
    """Hold one row's queries, keys and values, [1, heads, positions, width], and its plan."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: AttentionPlan
    rows: PackedTensors


@dataclass(frozen=True)
class Way:
    """Describe one way to compute the output."""

    name: str
    compute: Callable[[], Tensor]
    has_backward: bool = True
    alone: bool = False
    """Whether the output is [tokens, heads, width], samples laid out one after the other."""


def attention(place: Place) -> None:
    """Report milliseconds of all ways, and that they agree."""
    if place.rehearse:
        place.report.stand_in("FlexAttention uncompiled, forward alone; dense attention for varlen")
    table: list[list[float | str]] = []
    for mask in SMALL if place.rehearse else MASKS:
        inputs = make_inputs(mask, place)
        places = samples_of(inputs.rows)[2].to(place.device)
        reference = None
        for way in ways(inputs, place):
            try:
                forward, both, out = time_way(place, inputs, way)
            except Exception as error:  # noqa: BLE001 - one way; the others are of use
                failed = f"{type(error).__name__}: {str(error)[:150]}"
                table.append([mask.name, way.name, failed, ""])
                place.report.table("attention", COLUMNS, table)
                continue
            table.append([mask.name, way.name, forward, both])
            place.report.table("attention", COLUMNS, table)
            of_samples = out if way.alone else out[0].transpose(0, 1)[places]
            if reference is None:
                reference = of_samples
                continue
            far = float((of_samples - reference).norm() / reference.norm())
            place.report.check(f"{mask.name}, {way.name}: the same", far < 0.02, f"{far:.1e}")
    timed = sum(isinstance(row[2], float) for row in table)
    place.report.check("ways were timed", timed >= len(table) - 4, f"{timed} of {len(table)}")


def time_way(place: Place, inputs: Inputs, way: Way) -> tuple[float, float | str, Tensor]:
    """Return milliseconds forward, and with the backward pass where there is one; the output."""
    with torch.no_grad():
        out = way.compute()
        forward = seconds_of(way.compute, place.device)
    both: float | str = ""
    if way.has_backward and not place.rehearse:
        gradient = torch.randn_like(out)

        def step() -> None:
            torch.autograd.grad(way.compute(), (inputs.q, inputs.k, inputs.v), gradient)

        both = 1e3 * seconds_of(step, place.device)
    return 1e3 * forward, both, out.float()


def ways(inputs: Inputs, place: Place) -> Iterator[Way]:
    """Yield every way to compute attention for these samples."""
    kernel = attend_trees if place.rehearse else compiled_flex()
    scale = WIDTH**-0.5
    q = inputs.q
    k = inputs.k
    v = inputs.v
    plan = inputs.plan
    mask = plan.flex(None)
    yield Way("expanded", lambda: flex_attend(q, k, v, plan, scale, None, None, kernel))

    def flex(times: int, options: dict[str, int | bool]) -> Tensor:
        wide = [x.repeat_interleave(times, dim=1) for x in (k, v)]
        for tensor in (q, *wide):
            torch._dynamo.mark_dynamic(tensor, 2)
        return kernel(q, *wide, mask, scale, None, options)

    plain: dict[str, int | bool] = {"IS_DIVISIBLE": True}
    yield Way("grouped", lambda: flex(1, plain))
    for forward, backward in zip(TILES, BACKWARD_TILES, strict=True):
        tiles = tile_options(forward, backward)
        name = f"tuned {forward} {backward}"
        yield Way(name, lambda tiles=tiles: flex(HEADS // KV_HEADS, plain | tiles))
    starts, longest, places = samples_of(inputs.rows)
    places = places.to(q.device)
    starts = starts.to(q.device)

    def alone() -> list[Tensor]:
        return [x[0].transpose(0, 1)[places] for x in (q, k, v)]

    yield Way("varlen", lambda: varlen(alone(), starts, longest, place.rehearse), alone=True)
    if not place.rehearse:
        yield Way("varlen, FA3", lambda: fa3(alone(), starts, longest), False, alone=True)


def tile_options(forward: Tiles, backward: Tiles) -> dict[str, int | bool]:
    """Return FlexAttention's options for tiles of forward and backward kernels."""
    rows, columns, stages, warps = forward
    options: dict[str, int | bool] = {"fwd_BLOCK_M": rows, "fwd_BLOCK_N": columns}
    options |= {"fwd_num_stages": stages, "fwd_num_warps": warps}
    rows, columns, stages, warps = backward
    options |= {"bwd_BLOCK_M1": rows, "bwd_BLOCK_N1": columns}
    options |= {"bwd_BLOCK_M2": columns, "bwd_BLOCK_N2": rows}
    return options | {"bwd_num_stages": stages, "bwd_num_warps": warps}


def varlen(alone: list[Tensor], starts: Tensor, longest: int, rehearse: bool) -> Tensor:
    """Compute causal attention of samples laid end to end, without shared prompts."""
    q = alone[0]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in alone[1:])
    if rehearse:
        parts = []
        for begin, end in itertools.pairwise(starts.tolist()):
            part = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
            parts.append(torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True))
        return torch.cat([part.transpose(0, 1) for part in parts])
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0)  # causal
    return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window)


def fa3(alone: list[Tensor], starts: Tensor, longest: int) -> Tensor:
    """Compute the same by the FlashAttention 3 that vLLM brings."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v = alone
    return flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=longest,
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        cu_seqlens_k=starts,
        causal=True,
        fa_version=3,
    )


def make_inputs(mask: Mask, place: Place) -> Inputs:
    """Return random queries, keys and values for a full row."""
    rows = make_row(mask)
    device = place.device
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (1, heads, mask.length, WIDTH)
        made = torch.randn(shape, generator=generator, device=device)
        return made.to(torch.bfloat16).requires_grad_(not place.rehearse)

    ids = (rows.group_ids, rows.parent_ids, rows.input_pos)
    plan = attention_plan(*(x.to(device) for x in ids), torch.bfloat16)
    return Inputs(random(HEADS), random(KV_HEADS), random(KV_HEADS), plan, rows)


def make_row(mask: Mask) -> PackedTensors:
    """Return a row with as many groups as fit."""
    groups = mask.length // (mask.prompt - 1 + GROUP * mask.answer)
    assert groups > 0, f"{mask}: not one group fits"
    results = []
    for number in range(groups * GROUP):
        group = number // GROUP
        n = mask.prompt
        m = mask.answer
        tokens = [1 + group] * n + [1 + number] * m
        results.append(
            TokenizedResult(
                task_id=str(group),
                sample=number % GROUP,
                token_ids=tokens,
                assistant_mask=[False] * n + [True] * m,
                input_pos=list(range(n + m)),
                logprobs=[-1.0] * (n + m),
                prompt_length=n,
                reward=0.0,
                advantage=1.0,
                weights_version=0,
            )
        )
    packed = packed_tensors_from_tokenized_results(results, seq_len=mask.length, pad_id=0)
    assert packed.num_rows == 1, "the groups were counted to fit one row"
    return packed


def samples_of(rows: PackedTensors) -> tuple[Tensor, int, Tensor]:
    """Return where each sample starts once laid out by itself (int32), the longest, and the places
    in the row of all their tokens, the shared prompt's again for each."""
    groups = rows.group_ids[0]
    parents = rows.parent_ids[0]
    starts = [0]
    places = []
    leaves = sorted({int(g) for g in groups[rows.sample_ids[0] >= 0].tolist()})
    for leaf in leaves:
        own = (groups == leaf).nonzero()[:, 0]
        parent = int(parents[own[0]])
        if parent != leaf:
            own = torch.cat([(groups == parent).nonzero()[:, 0], own])
        places.append(own)
        starts.append(starts[-1] + len(own))
    longest = max(len(own) for own in places)
    return torch.tensor(starts, dtype=torch.int32), longest, torch.cat(places)

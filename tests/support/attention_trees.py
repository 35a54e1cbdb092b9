"""Rows of trees, and queries, keys and values for them."""

import random

import torch


def trees(seed, rows=2, seq_len=60, longest=9, depth=4):
    """Ids and positions [rows, seq_len] of random trees; most rows end in padding."""
    draw = random.Random(seed)
    groups, parents = (torch.full((rows, seq_len), -1) for _ in range(2))
    positions = torch.zeros(rows, seq_len, dtype=torch.int64)
    for row in range(rows):
        number, place, stop = 0, 0, seq_len - draw.choice([0, 3, 11])

        def grow(parent, before, below):
            nonlocal number, place
            length = min(draw.randint(1, longest), stop - place)  # noqa: B023
            if length <= 0:
                return
            own, number = number, number + 1
            here = slice(place, place + length)
            groups[row, here], parents[row, here] = own, own if parent is None else parent  # noqa: B023
            positions[row, here] = torch.arange(before, before + length)  # noqa: B023
            place += length
            for _ in range(draw.choice([0, 1, 2, 3]) if below else 0):
                grow(own, before + length, below - 1)

        while place < stop:
            grow(None, 0, depth)
    return groups, parents, positions


def siblings(prompt, lengths, rows=1):
    """One prompt with completions of these lengths, the same in each row."""
    sizes = [prompt, *lengths]
    groups = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    starts = [0] + [prompt] * len(lengths)
    positions = torch.cat(
        [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    )
    return tuple(
        x.expand(rows, -1).contiguous() for x in (groups, torch.zeros_like(groups), positions)
    )


def tensors(rows, seq_len, dtype, heads=4, kv_heads=2, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, h, seq_len, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def with_gradients(out, inputs, real):
    """Output and gradients, without what stands at padding."""
    out = out * real[:, None, :, None]
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

"""Masks: drawn matrices are the specification; an independent recursive definition checks what
nobody drew.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from ttrl.data.packing.masks import block_mask, dense_mask, subtree_ends


def drawn(text: str) -> torch.Tensor:
    return torch.tensor(
        [[char == "1" for char in line.split()[0]] for line in text.split("\n") if line.strip()]
    )


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_two_completions_of_a_prompt_see_it_but_not_each_other():
    expected = drawn("""
        1000000
        1100000
        1110000
        1111000
        1100100
        1100110
        0000001
    """)
    groups, parents = ids([0, 0, 1, 1, 2, 2, -1]), ids([0, 0, 0, 0, 0, 0, -1])
    assert torch.equal(dense_mask(groups, parents)[0], expected)


def test_a_tree_of_three_levels():
    # 0 is the root; 1 and 4 continue it; 2 and 3 continue 1.
    expected = drawn("""
        1000000
        1100000
        1110000
        1111000
        1110100
        1110110
        1000001
    """)
    groups, parents = ids([0, 1, 1, 2, 3, 3, 4]), ids([0, 0, 0, 1, 1, 1, 0])
    assert torch.equal(dense_mask(groups, parents)[0], expected)


def test_two_prompts_in_a_row_and_a_row_of_padding():
    expected = drawn("""
        10000
        11000
        00100
        00110
        00001
    """)
    groups, parents = ids([0, 1, 2, 3, -1], [-1] * 5), ids([0, 0, 2, 2, -1], [-1] * 5)
    mask = dense_mask(groups, parents)
    assert torch.equal(mask[0], expected)
    assert torch.equal(mask[1], torch.eye(5, dtype=torch.bool))


def test_ends_of_a_chain_and_of_a_short_row():
    ends = subtree_ends(ids([0, 1, 2, 3], [0, 0, -1, -1]), ids([0, 0, 1, 2], [0, 0, -1, -1]))
    assert ends.tolist() == [[4, 4, 4, 4], [2, 2, 3, 4]]


def test_groups_that_do_not_stand_depth_first_are_no_row_of_ours():
    with pytest.raises(AssertionError, match="depth first"):
        dense_mask(ids([0, 1, 2, 3]), ids([0, 0, 0, 1]))  # 2 stands between 1 and what continues 1


def test_a_tree_as_deep_as_the_row_is_long():
    length = 3000
    groups = torch.arange(length)[None]
    parents = (groups - 1).clamp(min=0)
    assert subtree_ends(groups, parents).unique().tolist() == [length]
    assert torch.equal(
        dense_mask(groups, parents)[0], torch.ones(length, length, dtype=torch.bool).tril()
    )


@st.composite
def forests(draw, max_groups: int = 7, max_run: int = 6) -> tuple[list[int], list[int]]:
    """One row: runs of groups, each continuing the group before or one that this one continues, or
    a root; then padding.
    """
    group_ids, parent_ids, path = [], [], []
    for group in range(draw(st.integers(0, max_groups))):
        path = path[: draw(st.integers(0, len(path)))]
        length = draw(st.integers(1, max_run))
        group_ids += [group] * length
        parent_ids += [path[-1] if path else group] * length
        path = [*path, group]
    padding = draw(st.integers(0 if group_ids else 1, max_run))
    return group_ids + [-1] * padding, parent_ids + [-1] * padding


def sees(groups: list[int], parents: list[int], query: int, key: int) -> bool:
    """The rule, told for one pair of tokens."""

    def continues(group: int, ancestor: int) -> bool:
        parent = parents[groups.index(group)]
        return group == ancestor or (parent != group and continues(parent, ancestor))

    if groups[query] < 0 or groups[key] < 0:
        return query == key
    return key <= query and continues(groups[query], groups[key])


def stack(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(groups) for groups, _ in rows)
    return tuple(
        torch.tensor([row[i] + [-1] * (longest - len(row[i])) for row in rows]) for i in (0, 1)
    )


@given(st.lists(forests(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=80)
def test_dense_mask_is_the_recursive_definition(rows):
    groups, parents = stack(rows)
    expected = [
        [[sees(g, p, query, key) for key in range(len(g))] for query in range(len(g))]
        for g, p in zip(groups.tolist(), parents.tolist())
    ]
    assert dense_mask(groups, parents).tolist() == expected


@given(st.lists(forests(max_run=40), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_block_mask_is_the_dense_mask_and_skips_what_it_can(rows):
    groups, parents = stack(rows)
    dense, size = dense_mask(groups, parents), 16
    mask = block_mask(subtree_ends(groups, parents), block_size=size)
    length = groups.shape[1]
    blocks = -(-length // size)
    padded = torch.zeros(len(rows), blocks * size, blocks * size, dtype=torch.bool)
    padded[:, :length, :length] = dense
    tiles = padded.view(len(rows), blocks, size, blocks, size).transpose(2, 3)
    full = tiles.all(dim=-1).all(dim=-1)
    empty = ~tiles.any(dim=-1).any(dim=-1)
    for row in range(len(rows)):
        for query in range(blocks):
            mixed_at = mask.kv_indices[row, 0, query, : mask.kv_num_blocks[row, 0, query]].tolist()
            full_at = mask.full_kv_indices[
                row, 0, query, : mask.full_kv_num_blocks[row, 0, query]
            ].tolist()
            assert full_at == [key for key in range(blocks) if full[row, query, key]]
            assert mixed_at == [
                key
                for key in range(blocks)
                if not full[row, query, key] and not empty[row, query, key]
            ]
    # the entries inside the mixed blocks
    b, q, k = torch.meshgrid(
        torch.arange(len(rows)), torch.arange(length), torch.arange(length), indexing="ij"
    )
    assert torch.equal(mask.mask_mod(b, torch.zeros_like(b), q, k), dense)


def test_flex_attention_with_the_block_mask_equals_plain_masked_attention():
    torch.manual_seed(0)
    rows = [
        ([0] * 150 + [1] * 70 + [2] * 130 + [3] * 20, [0] * 370),  # a prompt and three completions
        (
            [0] * 40 + [1] * 60 + [2] * 100 + [3] * 30 + [-1] * 140,
            [0] * 40 + [0] * 60 + [1] * 100 + [3] * 30 + [-1] * 140,
        ),
    ]
    groups, parents = stack(rows)
    q, k, v = (torch.randn(2, 3, 370, 16, dtype=torch.float32) for _ in range(3))
    mask = block_mask(subtree_ends(groups, parents))
    assert int(mask.full_kv_num_blocks.sum()) > 0
    out = flex_attention(q, k, v, block_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense_mask(groups, parents).unsqueeze(1)
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    # The kernel on CUDA skips full blocks' mask_mod; eager FlexAttention on CPU does not, so the
    # block lists are used here too.
    torch.testing.assert_close(attention_by_blocks(q, k, v, mask), expected, atol=1e-5, rtol=1e-5)


def attention_by_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask) -> torch.Tensor:
    """Attention that visits the listed blocks alone and asks mask_mod in the mixed ones alone, as
    the CUDA kernel does.
    """
    batch, heads, length, dim = q.shape
    size = mask.BLOCK_SIZE[0]
    scores = torch.full((batch, heads, length, length), -torch.inf)
    for b in range(batch):
        for block in range(-(-length // size)):
            qs = torch.arange(block * size, min((block + 1) * size, length))
            for counts, indices, is_full in (
                (mask.kv_num_blocks, mask.kv_indices, False),
                (mask.full_kv_num_blocks, mask.full_kv_indices, True),
            ):
                for key in indices[b, 0, block, : counts[b, 0, block]].tolist():
                    ks = torch.arange(key * size, min((key + 1) * size, length))
                    tile = q[b][:, qs] @ k[b][:, ks].transpose(1, 2) / dim**0.5
                    if not is_full:
                        at = torch.tensor(b), torch.tensor(0), qs[:, None], ks[None, :]
                        tile = tile.masked_fill(~mask.mask_mod(*at), -torch.inf)
                    scores[b][:, qs[:, None], ks[None, :]] = tile
    return scores.softmax(dim=-1) @ v


def test_nothing_as_large_as_the_row_squared_is_made_for_a_block_mask():
    length = 1 << 15
    groups = torch.arange(length)[None] // 256
    parents = torch.where(groups % 8 == 0, groups, groups // 8 * 8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        block_mask(subtree_ends(groups, parents))
    assert length <= largest <= 4 * length  # against 32768 x length for a dense mask

"""Recurrent layers over packed trees, against a loop over whole samples."""

import hypothesis.strategies as st
import torch
from hypothesis import assume, given
from torch.nn import functional as F

from ttrl.training.kernels.branching import Scan, branches_of, branching_convolution, branching_scan

SCAN = Scan(("x", "decay"), "initial", "wants", fill={})
EXACT = SCAN._replace(fill=None)


def scan(x, decay, initial=None, wants=False):
    """s = s·decay + x, token by token; x and decay [B, T, D]. A token of zeros ends what was before
    it.
    """
    state = torch.zeros_like(x[:, 0]) if initial is None else initial
    out = []
    for t in range(x.shape[1]):
        state = state * decay[:, t] + x[:, t]
        out.append(state)
    return torch.stack(out, 1), state if wants else None


def convolve(x, weight, bias=None):
    k = weight.shape[-1]
    return F.conv1d(F.pad(x, (k - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])


@st.composite
def rows(draw):
    """Packed rows as (group ids, parent ids), depth first, with padding behind."""
    length = draw(st.integers(4, 24))
    ids, parents = [], []
    for _ in range(draw(st.integers(1, 3))):
        row_ids, row_parents, path, number = [], [], [], 0
        while len(row_ids) < length and draw(st.integers(0, 5)):
            path = path[: draw(st.integers(0, len(path)))]
            count = min(draw(st.integers(1, 5)), length - len(row_ids))
            row_ids += [number] * count
            row_parents += [path[-1] if path else number] * count
            path.append(number)
            number += 1
        rest = length - len(row_ids)
        ids.append(row_ids + [-1] * rest)
        parents.append(row_parents + [-1] * rest)
    return torch.tensor(ids), torch.tensor(parents)


def paths(ids, parents):
    """(row, positions) of each group's tokens after those of its ancestors."""
    for row in range(len(ids)):
        whole = {}
        for group in dict.fromkeys(ids[row].tolist()):
            if group < 0:
                continue
            own = (ids[row] == group).nonzero().flatten().tolist()
            parent = int(parents[row, own[0]])
            whole[group] = ([] if parent == group else whole[parent]) + own
            yield row, whole[group], own


@given(rows(), st.booleans())
def test_a_scan_begins_with_the_state_of_its_parent(tree, exact):
    ids, parents = tree
    assume((ids >= 0).any())
    torch.manual_seed(0)
    x, decay = (
        torch.rand(*ids.shape, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    weights = torch.rand_like(x) * (ids >= 0).unsqueeze(-1)
    # Zeros make this scan forget, so that filling up is right behind leaves alone: the exact
    # batches have no other.
    out = branching_scan(
        scan,
        EXACT if exact else SCAN._replace(fill={"decay": 1.0}),
        {"x": x, "decay": decay},
        branches_of(ids, parents),
    )
    ours = torch.autograd.grad((out * weights).sum(), (x, decay))
    wanted = torch.zeros_like(x)
    for row, path, own in paths(ids, parents):
        whole, _ = scan(x[row : row + 1, path], decay[row : row + 1, path])
        wanted = wanted.index_put((torch.tensor(row), torch.tensor(own)), whole[0, -len(own) :])
    theirs = torch.autograd.grad((wanted * weights).sum(), (x, decay))
    assert torch.allclose(out, wanted)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


@given(rows(), st.integers(1, 5))
def test_a_convolution_sees_the_inputs_of_its_ancestors(tree, taps):
    ids, parents = tree
    assume((ids >= 0).any())
    torch.manual_seed(0)
    x = torch.rand(ids.shape[0], 2, ids.shape[1], dtype=torch.float64, requires_grad=True)
    weight, bias = torch.rand(2, taps, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    out = branching_convolution(convolve, x, weight, branches_of(ids, parents), bias=bias)
    out = out * (ids >= 0).unsqueeze(1)
    wanted = torch.zeros_like(x)
    for row, path, own in paths(ids, parents):
        whole = convolve(x[row : row + 1, :, path], weight, bias)
        wanted[row, :, own] = whole[0, :, -len(own) :]
    assert torch.allclose(out, wanted)
    (ours,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    (theirs,) = torch.autograd.grad(wanted.square().sum(), x)
    assert torch.allclose(ours, theirs)


def test_rows_of_padding_alone_are_computed():
    """A process is given such rows where the others have the last ones."""
    ids = torch.full((2, 6), -1)
    x = torch.rand(2, 6, 3, requires_grad=True)
    out = branching_scan(scan, SCAN, {"x": x, "decay": x}, branches_of(ids, ids))
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_groups_of_about_the_same_length_are_computed_together():
    lengths = [9, 8, 5, 4, 2]
    ids = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]])
    (roots,) = branches_of(ids, ids).batches
    assert [batch.index.shape for batch in roots] == [(3, 9), (2, 4)]


def test_groups_with_children_are_not_filled_up_where_nothing_may_be():
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 3]])
    parents = torch.tensor([[0, 0, 0, 0, 2, 2, 2]])
    roots, leaves = branches_of(ids, parents).exact_batches
    assert [batch.index.tolist() for batch in roots] == [[[0, 1, 2]], [[4, 5]]]
    assert [batch.parents.tolist() for batch in leaves] == [[0, 1]]

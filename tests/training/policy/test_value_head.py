"""The value head: what it learns from, what it changes, and its file."""

import pytest
import torch

from ttrl.errors import ModelFolderError
from ttrl.training.policy.value_head import (
    FILE_NAME,
    ValueHead,
    load_value_head,
    save_value_head,
    value_loss,
)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_loss_is_the_formula_and_so_is_its_gradient():
    values, returns, old = (
        float64(0.1, 0.9, 0.5, -0.4),
        float64(1.0, 0.0, 0.6, -0.4),
        float64(0.0, 0.2, 0.5, 0.5),
    )
    torch.testing.assert_close(value_loss(values, returns), float64(0.405, 0.405, 0.005, 0.0))
    expected = []
    for v, r, o in zip(values.tolist(), returns.tolist(), old.tolist(), strict=True):
        near = o + min(max(v - o, -0.3), 0.3)
        expected.append(max((v - r) ** 2, (near - r) ** 2) / 2)
    torch.testing.assert_close(value_loss(values, returns, old, 0.3), float64(*expected))
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns), (values,))
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, old, 0.3), (values,))


def test_clipping_stops_a_value_on_its_way_but_not_on_its_way_back():
    values, returns = float64(0.5, 0.5).requires_grad_(), float64(1.0, -1.0)
    value_loss(values, returns, float64(0.0, 0.0), 0.2).sum().backward()
    assert values.grad.tolist() == [0.0, 1.5]


def test_starts_at_zero_and_learns():
    torch.manual_seed(0)
    head = ValueHead(8, 16)
    hidden = torch.randn(32, 8)
    wanted = torch.sin(hidden[:, 0])
    assert head(hidden).shape == (32,) and not head(hidden).any()
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        value_loss(head(hidden), wanted).mean().backward()
        optimizer.step()
    assert (
        value_loss(head(hidden), wanted).mean() < 0.1 * value_loss(torch.zeros(32), wanted).mean()
    )


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_below_is_trained_where_asked(asked):
    head = ValueHead(4, grad_in_decoder=asked)
    torch.nn.init.ones_(head.down.weight)
    hidden = torch.ones(3, 4, requires_grad=True)
    head(hidden).sum().backward()
    assert (hidden.grad is not None) == asked
    assert head.up.weight.grad.any()


def test_lower_precision_below_does_not_reach_it():
    head = ValueHead(4)
    torch.nn.init.ones_(head.down.weight)
    hidden = torch.linspace(-1, 1, 12).view(3, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        values = head(hidden)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, head(hidden.float()), rtol=0, atol=0)
    assert head(torch.zeros(0, 4)).shape == (0,)


def test_file(tmp_path):
    head, other = ValueHead(4, 6), ValueHead(4, 6)
    assert not load_value_head(head, tmp_path)  # none there: it starts afresh
    torch.nn.init.normal_(head.down.weight)
    save_value_head(head.state_dict(), tmp_path)
    assert load_value_head(other, tmp_path)
    for name, tensor in head.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(
        ModelFolderError,
        match=r"it holds .*\[6, 4\].* but the value head is .*\[5, 4\].*another model",
    ):
        load_value_head(ValueHead(4, 5), tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"no tensors")
    with pytest.raises(ModelFolderError, match=r"cannot be read .*delete it"):
        load_value_head(head, tmp_path)

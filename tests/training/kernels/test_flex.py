"""FlexAttention as GPUs get it: compiled, in few graphs, and never otherwise. On the CPU, whose
kernels have no backward pass, the graphs are run by PyTorch's own operations."""

import pytest
import torch
from support.attention_trees import tensors, trees, with_gradients
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention as pytorchs

from ttrl.configs import GRPOConfig
from ttrl.errors import UserError
from ttrl.training.kernels import attention
from ttrl.training.kernels.attention import attention_plan, compiled_flex, dense_attend, flex_attend
from ttrl.training.policy.activation_memory import checkpoint_layers


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.forward = self.backward = 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph, inputs):
        self.forward += 1
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    def _backward(self, graph, inputs):
        self.backward += 1
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Let FlexAttention have gradients, which PyTorch refuses on CPUs, and forget what other tests
    compiled.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(pytorchs, "_validate_device", lambda *_: None)
    yield
    torch._dynamo.reset()


def test_two_graphs_serve_all_lengths_and_batches_and_two_more_all_windows():
    """Today's limit is 8 graphs; the ninth length was computed with all T × T scores."""
    counting = Counting()
    kernel = compiled_flex(counting.backend)
    for number, T in enumerate(range(1, 210, 19)):
        rows = 1 + number % 3
        ids = trees(T, rows, T, longest=40)
        plan = attention_plan(*ids, torch.float32)
        for window in (None, 3 + number):
            inputs = tensors(rows, T, torch.float32, width=16)
            ours, dense = (
                with_gradients(out, inputs, ids[0] >= 0)
                for out in (
                    flex_attend(*inputs, plan, 0.3, None, window, kernel),
                    dense_attend(*inputs, plan, 0.3, None, window),
                )
            )
            for one, other in zip(ours, dense, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                again = (
                    flex_attend(*inputs, plan, 0.3, None, window, kernel)
                    * (ids[0] >= 0)[:, None, :, None]
                )
            torch.testing.assert_close(again, ours[0])
    assert number > 8 and (counting.forward, counting.backward) == (4, 2)


def test_soft_caps_have_gradients():
    counting = Counting()
    ids = trees(3, 2, 150, longest=40)
    inputs, plan = tensors(2, 150, torch.float32, width=16), attention_plan(*ids, torch.float32)
    for one, other in zip(
        *(
            with_gradients(out, inputs, ids[0] >= 0)
            for out in (
                flex_attend(*inputs, plan, 0.3, 1.5, 20, compiled_flex(counting.backend)),
                dense_attend(*inputs, plan, 0.3, 1.5, 20),
            )
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_attention_that_is_not_compiled_is_an_error():
    inputs, plan = tensors(1, 20, torch.float32), attention_plan(*trees(1, 1, 20), torch.float32)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UserError, match="256×256 scores; remove TORCH_COMPILE_DISABLE"),
    ):
        flex_attend(*inputs, plan, 0.3, None, None, compiled_flex("eager"))


def test_too_many_graphs_are_an_error():
    plan = attention_plan(*trees(1, 1, 20), torch.float32)
    kernel = compiled_flex("eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for scale in (0.1, 0.2):
            flex_attend(*tensors(1, 20, torch.float32), plan, scale, None, None, kernel)
        with pytest.raises(UserError, match=r"256×256 scores.*TORCH_LOGS=recompiles"):
            flex_attend(*tensors(1, 20, torch.float32), plan, 0.3, None, None, kernel)


@pytest.mark.e2e
@pytest.mark.long
def test_selective_checkpointing_keeps_what_compiled_attention_returned(monkeypatch):
    """With a stand-in for FlexAttention, which no CPU can differentiate when compiled by inductor.

    Long, as C++ is compiled: only this keeps what inductor returned. What is kept of layers that
    are not compiled: tests/training/test_switches.py.
    """
    runs = []

    @torch.library.custom_op("ttrl_test::attend", mutates_args=())
    def attend(q: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return q.sin()

    attend.register_fake(torch.empty_like)
    attend.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    monkeypatch.setattr(
        attention, "attend_trees", lambda q, k, v, *_: attend(q) * k.mean() * v.mean()
    )
    plan = attention_plan(*trees(1, 1, 20), torch.float32)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x):
            return flex_attend(x @ self.weight, x, x * 2, plan, 1.0, None, None, compiled_flex())

    gradients = {}
    for keeps, expected in (("nothing", 2), ("products", 1)):
        layers = nn.ModuleList([Layer(), Layer()])
        checkpoint_layers(layers, GRPOConfig(model="m", checkpoint_keeps=keeps))
        runs.clear()
        x = torch.linspace(0, 1, 160).view(1, 1, 20, 8)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        assert len(runs) == expected * len(layers)
        gradients[keeps] = [parameter.grad for parameter in layers.parameters()]
    for one, other in zip(gradients["nothing"], gradients["products"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("head_dim", "shared"), [(64, 99), (128, 99), (256, 163), (256, 227)])
def test_gpus_with_enough_shared_memory_keep_pytorchs_tiles(head_dim, shared):
    assert attention.kernel_options(head_dim, torch.bfloat16, shared * 1024) == {
        "IS_DIVISIBLE": True
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [160, 256])
def test_large_heads_get_smaller_tiles_where_shared_memory_is_small(head_dim, dtype):
    options = attention.kernel_options(head_dim, dtype, 99 * 1024)
    bytes_of = head_dim * dtype.itemsize
    assert (options["fwd_BLOCK_M"] + 2 * options["fwd_BLOCK_N"]) * bytes_of < 99 * 1024
    assert all(128 % size == 0 for name, size in options.items() if "BLOCK" in name)

"""What starts vLLM sooner: ranks without a compiler, and an engine that does not hold the API
server's port.

Only the vLLM that is installed has what is replaced.
"""

import contextlib
import functools
import importlib
import os
import socket
import sys
import traceback

import pytest
import torch

pytestmark = pytest.mark.e2e  # vLLM is imported


def in_a_fork(check):
    """Run a test in a fork of this process: what it replaces in vLLM is replaced only there."""

    @functools.wraps(check)
    def run():
        importlib.import_module("vllm.v1.engine.core")  # once, for all forks
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
                    check()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                    raise
            sys.stderr.flush()
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0, "see what it has written to stderr"

    return run


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (300, 512), (5, 70_001)])
def test_ranks(rows, columns):
    from ttrl.vllm_worker.api_server import count_at_least

    # With ties.
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    x[:, -1] = -torch.inf
    for place in (0, columns - 1):
        values = x[:, place : place + 1].clone()
        found = count_at_least(x, values)
        assert found.dtype == torch.int64
        assert torch.equal(found, (x >= values).sum(-1))


@in_a_fork
def test_this_vllm_uses_what_starts_it_sooner():
    """Else a server would still start, in twice the time."""
    from vllm.v1.engine import utils
    from vllm.v1.sample import sampler

    from ttrl.vllm_worker import api_server as serve

    serve._start_sooner()
    assert utils.get_mp_context().get_start_method() == "fork"
    assert "get_mp_context" in utils.CoreEngineProcManager.__init__.__code__.co_names
    assert sampler.batched_count_greater_than is serve.count_at_least
    assert "batched_count_greater_than" in sampler.Sampler.gather_logprobs.__code__.co_names


@in_a_fork
def test_it_listens_at_the_port_that_is_held_for_it():
    from ttrl.vllm_worker.api_server import share_port

    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(held.getsockname())
        share_port(held.getsockname()[1])
        with socket.create_server(held.getsockname()), socket.create_connection(held.getsockname()):
            pass


def test_a_port_does_not_stay_with_a_forked_process():
    from ttrl.vllm_worker.api_server import close_listening_sockets

    gate, opened = os.pipe()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        port = server.getsockname()[1]
        child = os.fork()
        if child == 0:  # it lives on until the pipe says so
            close_listening_sockets()
            client.sendall(b"x")  # other connections are left alone
            os.read(gate, 1)
            os._exit(0)
        try:
            accepted, _ = server.accept()
            with accepted:
                assert accepted.recv(1) == b"x"
            server.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10)
        finally:
            os.write(opened, b"x")
            os.waitpid(child, 0)
            os.close(gate)
            os.close(opened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[0, 0, 0, 0, 0], [0, 2, 1, 1, 0], [2, -1, 0, -1, 2], [-1] * 5])
def test_adapters_by_products(slots, dtype):
    """As vLLM's own operations, but for tokens without an adapter: nothing is added to them."""
    from vllm.lora.ops.torch_ops import lora_ops

    from ttrl.vllm_worker import api_server as serve

    assert lora_ops.bgmv_expand.__module__ == lora_ops.__name__  # theirs, in this process
    generator = torch.Generator().manual_seed(0)
    down, up, x, y = (
        torch.randn(n, generator=generator).to(dtype)
        for n in ((3, 1, 4, 32), (3, 1, 8, 4), (5, 32), (5, 20))
    )
    where = torch.tensor(slots)
    there = where >= 0
    buffers, outputs = [], []
    for way in (lora_ops, serve):
        buffer, whole, part, new = torch.zeros(5, 4), y.clone(), y.clone(), y.clone()
        way.bgmv_shrink(x, down, buffer, where, 2.0)
        way.bgmv_expand(buffer, up, whole, where, add_inputs=True)
        way.bgmv_expand_slice(buffer, up, part, where, 7, 8, add_inputs=True)
        way.bgmv_expand_slice(buffer, up, new, where, 7, 8, add_inputs=False)
        buffers.append(buffer)
        outputs.append((whole, part, new))
    torch.testing.assert_close(buffers[1][there], buffers[0][there])
    for theirs, ours in zip(*outputs, strict=True):
        torch.testing.assert_close(ours[there], theirs[there])
    whole, part, new = outputs[1]
    assert not buffers[1][~there].any()
    assert (
        torch.equal(whole[~there], y[~there])
        and torch.equal(part[~there], y[~there])
        and not new[~there][:, 7:15].any()
    )


@in_a_fork
def test_this_vllm_applies_adapters_by_products():
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from ttrl.vllm_worker import api_server as serve

    serve._apply_adapters_by_products()
    assert punica_cpu.bgmv_shrink is lora_ops.bgmv_shrink is serve.bgmv_shrink
    # These use them.
    for way in (lora_ops.sgmv_shrink, lora_ops.sgmv_expand, lora_ops.sgmv_expand_slice):
        assert any(
            name in way.__code__.co_names
            for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
        )


def test_the_delta_rule_in_float32_is_that_of_transformers():
    """A prompt at once, and its last token in a step of its own; two sequences, of which one begins
    with a state.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    from ttrl.vllm_worker.delta_rule import _Operations

    ours = _Operations(None)
    draw = torch.Generator().manual_seed(0)
    tokens, heads, times, width = 70, 2, 3, 8

    def random(*shape):
        return torch.randn(shape, generator=draw)

    query, key = random(1, tokens, heads, width), random(1, tokens, heads, width)
    value = random(1, tokens, heads * times, width)
    gates = {"A_log": random(heads * times), "dt_bias": random(heads * times)}
    a, b = random(tokens, heads * times), random(tokens, heads * times)
    g, beta = ours.fused_gdn_gating_cpu(a=a, b=b, **gates)
    wide = [x.repeat_interleave(times, 2) for x in (query, key)]
    how = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    start = random(1, heads * times, width, width)
    wanted, state = theirs.torch_recurrent_gated_delta_rule(
        *wide, value, initial_state=start, **how
    )

    states = torch.cat([torch.zeros_like(start), start])
    prompt = tokens - 1
    given = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    parts = {name: x[:, :prompt] for name, x in given.items()}
    found, _ = ours.chunk_gated_delta_rule_cpu(
        **parts,
        initial_state=states,
        initial_state_indices=torch.tensor([1]),
        cu_seqlens=torch.tensor([0, prompt]),
    )
    assert torch.allclose(found, wanted[:, :prompt], atol=1e-5)
    last = {
        name: x[0, prompt:].unsqueeze(0) for name, x in (("q", query), ("k", key), ("v", value))
    }
    step = ours.fused_sigmoid_gating_delta_rule_update_cpu(
        **last,
        a=a[prompt:],
        b=b[prompt:],
        **gates,
        initial_state_source=states,
        initial_state_indices=torch.tensor([1]),
    )
    assert step.shape == (1, 1, heads * times, width)
    assert torch.allclose(step[0, 0], wanted[0, prompt], atol=1e-5)
    assert torch.allclose(states[1], state[0], atol=1e-5) and not states[0].any()


@in_a_fork
def test_models_that_also_see_pictures_are_imported_without_torchvision():
    from transformers.utils.import_utils import is_torchvision_available

    from ttrl.vllm_worker import api_server as serve

    if is_torchvision_available():
        return
    serve._stand_in_for_torchvision()
    assert importlib.import_module("vllm.model_executor.models.qwen3_5").Qwen3_5ForCausalLM
    assert not is_torchvision_available()


@in_a_fork
def test_queries_with_a_dimension_of_heads_are_turned_as_flat_ones():
    """LFM2's, which vLLM 0.32 turns wrongly on CPUs: the canary found log-probabilities 0.7 nats
    off.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from ttrl.vllm_worker import api_server as serve

    serve._rotate_every_head()
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            32,
            64,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            dtype=torch.float32,
        )
    positions = torch.arange(5)
    query, key = torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    wanted = rope.forward_native(positions, query.flatten(1).clone(), key.flatten(1).clone())
    found = rope.forward_cpu(positions, query.clone(), key.clone())
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours.flatten(1), theirs, atol=1e-6)
    assert rope.forward_cpu(positions, query.flatten(1).clone())[1] is None

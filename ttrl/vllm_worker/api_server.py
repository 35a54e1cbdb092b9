"""Start vLLM's API server as `python -m vllm.entrypoints.openai.api_server` does; on a CPU in half
the time.

There the engine is forked from the API server, with everything imported, instead of importing it
all again, and ranks are counted without compiling C++ for the first request. Measured with vLLM
0.32, a tiny model and two cores: healthy after 15 s instead of 24, for 15 CPU seconds instead of
23; the first validation of a run after 24 s instead of 55 to 71.

Plain products apply adapters there: vLLM copies an adapter's matrix for every token, and gives a
token without an adapter the last one loaded. With SmolLM2-135M and 32 to 96 sequences, sampling
took four times as long.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import runpy
import socket
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from ttrl.nanochat import OWN_MODEL_TYPES
from ttrl.system.files import read_object
from ttrl.vllm_worker import OWN_MODEL_VARIABLE
from ttrl.vllm_worker.delta_rule import compute_in_float32
from ttrl.vllm_worker.routing import OPTION, capture_on_cpus, stream_experts

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handler shows only its own children

_ROWS_AT_ONCE = 2**16  # elements: fits into a core's cache


def main() -> None:
    """Serve with the arguments of the command line."""
    share_port(int(sys.argv[sys.argv.index("--port") + 1]))
    if OPTION in sys.argv:
        stream_experts()
    if _is_own_model(Path(sys.argv[sys.argv.index("--model") + 1])):
        os.environ[OWN_MODEL_VARIABLE] = "1"  # for vLLM's child processes
        importlib.import_module("ttrl.vllm_worker.own_models").serve_own_models()
    if current_platform.is_cpu():
        _stand_in_for_torchvision()
        try:
            _start_sooner()
        except ImportError as error:
            logger.warning("unknown vLLM version: it starts its own, slower way: %s", error)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _is_own_model(folder: Path) -> bool:
    """Tell whether a folder's config names a class of ours."""
    try:
        return read_object(Path(folder, "config.json")).get("model_type") in OWN_MODEL_TYPES
    except (OSError, ValueError):
        return False


def share_port(port: int) -> None:
    """Let this process bind a port held by its parent, on any of vLLM's sockets."""
    bind = socket.socket.bind

    def bind_shared(self: Any, address: Any) -> None:
        if address[1:2] == (port,):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bind(self, address)

    socket.socket.bind = bind_shared  # type: ignore[method-assign]


def _stand_in_for_torchvision() -> None:
    """Let classes of models with vision be imported for their text: torch for CPUs comes without
    torchvision, needed only for pictures."""
    from transformers.utils.import_utils import is_torchvision_available

    # Caches the answer, so nothing takes the stand-ins below for the package.
    if is_torchvision_available():
        return
    name = ""
    for part in ("torchvision", ".transforms", ".v2", ".functional"):
        name += part
        sys.modules[name] = module = types.ModuleType(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _start_sooner() -> None:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    # Another Python would import all of this again.
    registry._run_in_subprocess = lambda inspect: inspect()
    importlib.import_module("vllm.v1.worker.cpu_worker")  # for the engine
    importlib.import_module("vllm.v1.engine.core")
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
    engines: Any = importlib.import_module("vllm.v1.engine.utils")
    sampler.batched_count_greater_than = count_at_least
    _apply_adapters_by_products()
    compute_in_float32()
    _rotate_every_head()
    if OPTION in sys.argv:
        capture_on_cpus()
    # vLLM forks by default, but wants a new interpreter on CPUs.
    engines.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=close_listening_sockets)


def _rotate_every_head() -> None:
    """Flatten queries and keys [tokens, heads, width] before vLLM rotates them on a CPU. Its kernel
    turns one head of such a tensor and leaves the others unchanged; LFM2 passes them in this form.
    """
    rotary: Any = importlib.import_module(
        "vllm.model_executor.layers.rotary_embedding.base"
    ).RotaryEmbedding
    theirs = rotary.forward_cpu

    def forward_cpu(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if key is None:
            flat_key = None
        else:
            flat_key = key.flatten(positions.dim())
        turned, turned_key = theirs(self, positions, query.flatten(positions.dim()), flat_key)
        return turned.view(query.shape), turned_key if key is None else turned_key.view(key.shape)

    rotary.forward_cpu = forward_cpu


def count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Count the elements of each row of `x`, (rows, n) in float32, of at least `values`, (rows, 1):
    the rank of each value in its row, (rows,) of int64. As fast as vLLM's compiled version (5 ms
    for 256 × 49,152 on one core; 73 ms in one piece).
    """
    rows = max(1, _ROWS_AT_ONCE // max(1, x.shape[1]))
    parts = zip(x.split(rows), values.split(rows), strict=True)
    # Sums of floats are vectorized, and exact up to 2**24.
    return torch.cat(
        [torch.ge(part, least, out=torch.empty_like(part)).sum(-1) for part, least in parts]
    ).long()


def _apply_adapters_by_products() -> None:
    operations: Any = importlib.import_module("vllm.lora.ops.torch_ops.lora_ops")
    users = (operations, importlib.import_module("vllm.lora.punica_wrapper.punica_cpu"))
    for ours in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
        if not hasattr(operations, ours.__name__):
            raise ImportError(f"{operations.__name__} has no {ours.__name__}")
        for module in users:
            setattr(module, ours.__name__, ours)


def bgmv_shrink(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0
) -> None:
    """Set `output`, (tokens, r or more), to scaling · A x of each token's adapter, zero without
    one; arguments as for vLLM's operation of this name. inputs: (tokens, n). weights: (adapters, 1,
    r, n). slots: (tokens,), -1 for no adapter.
    """
    output[:, : weights.shape[-2]] = scaling * _products(inputs, weights, slots, output.dtype)


def bgmv_expand(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True
) -> None:
    """Add B x of each token's adapter to the first columns of `output`, or set them to it;
    otherwise as `bgmv_shrink`.
    """
    bgmv_expand_slice(
        inputs, weights, output, slots, 0, min(weights.shape[-2], output.shape[1]), add_inputs
    )


def bgmv_expand_slice(
    inputs: Tensor,
    weights: Tensor,
    output: Tensor,
    slots: Tensor,
    offset: int,
    size: int,
    add_inputs: bool = True,
) -> None:
    """Apply `bgmv_expand` to `size` columns of `output` from `offset` on."""
    part = output[:, offset : offset + size]
    found = _products(inputs, weights, slots, output.dtype)[:, :size]
    if add_inputs:
        part += found
    else:
        part.copy_(found)


def _products(inputs: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each token's input times its adapter's matrix, (tokens, rows of a matrix)."""
    inputs = inputs.to(dtype)
    matrices = weights.flatten(0, -3)
    found = inputs.new_zeros(len(inputs), matrices.shape[1])
    for slot, matrix in enumerate(matrices):
        mine = slots == slot
        if mine.all():
            return torch.mm(inputs, matrix.to(dtype).T)
        if mine.any():
            found[mine] = inputs[mine] @ matrix.to(dtype).T
    return found


def close_listening_sockets() -> None:
    """Close inherited ports: a server's port would stay in use for its engine's lifetime."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family != socket.AF_UNIX and found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                os.close(int(name))


if __name__ == "__main__":
    main()

"""Attention over packed trees in fp32 by our own kernel (native_attention.c), where there are a C
compiler and AVX-512.

The flash kernel of PyTorch's CPU backend computes much of what causal attention leaves out (for
short runs nearly twice what is needed), splits scores and products into calls, and leaves merging
to its caller. This one goes through the parts of the rows in blocks that stay in the cache of a
core: on a Zen 4 core 1.25 to 1.4 times as fast, forward and backward. `ttrl.system.native_code`
compiles it. Without it, or with TTRL_NATIVE=0 in the environment,
`ttrl.training.kernels.split_attention` uses PyTorch's kernel; outputs and gradients are the same up
to rounding.

Whether it is used depends on the machine, shapes, dtype and number of threads alone: heads of keys
and values are distributed whole, so there must be at least as many as threads. The number of
threads changes no bit of its results.

Shapes: S tokens, H query heads, K key/value heads, E dimension of a head, P parts.
"""

import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ttrl.system import native_code
from ttrl.training.kernels.cpu_products import plain_on_cpu

logger = logging.getLogger(__name__)

_LARGEST = 256  # E, as in the source


def serves(*tensors: Tensor) -> bool:
    """Tell whether `forward` and `backward` should take these queries, keys and values, each [S, ·,
    E]. In bf16 PyTorch's kernel is slower even so, except on CPUs with matrix units for it."""
    (H, E), K = tensors[0].shape[1:], tensors[1].shape[1]
    dtypes = {x.dtype for x in tensors}
    known = dtypes == {torch.float32} or (
        dtypes == {torch.bfloat16} and not torch.cpu._is_amx_tile_supported()
    )
    fits = (
        known
        and all(x.shape[-1] == E for x in tensors)
        and E % 32 == 0
        and 0 < E <= _LARGEST
        and H % K == 0
    )
    if not (fits and plain_on_cpu(*tensors) and library() is not None):
        return False
    return _keeps_busy(torch.get_num_threads(), K)


@functools.cache
def _keeps_busy(threads: int, K: int) -> bool:
    """Tell whether there is a head of keys for each thread; logged once if not."""
    if threads > K:
        logger.info(
            "attention on CPUs by PyTorch's kernel: %d threads, and %d heads of keys to deal out",
            threads,
            K,
        )
    return threads <= K


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if this machine has none."""
    built = native_code.attention_kernel().library
    if built is not None:
        built.workspace.restype = ctypes.c_long
    return built


def forward(
    q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor, parts_P4: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs [S, H, E], zero where nothing is seen, and the log-sum-exp of scores [S, H] in
    units of log 2.

    parts: int64 (q0, q1, k0, k1): queries from q0 up to q1 see the keys from k0 up to k1, or, where
    q0 = k0, those of them up to their own position. No pair is in two parts.
    """
    found: tuple[Tensor, Tensor] = torch.ops.ttrl.tree_attention(
        q_SHE, k_SKE, v_SKE, parts_P4, scale
    )
    return found


def _forward(
    q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor, parts_P4: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(q_SHE)
    lse = q_SHE.new_full(q_SHE.shape[:2], -math.inf)
    built = library()
    assert built is not None
    _for_each_head(
        built.forward, (q_SHE, k_SKE, v_SKE, out, lse), parts_P4, k_SKE, q_SHE.shape[1], scale
    )
    return out, lse


# An operation, so that selective checkpointing can keep its results.
_OPERATIONS = torch.library.Library("ttrl", "DEF")
_OPERATIONS.define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor parts, float scale) -> (Tensor, Tensor)"
)
_OPERATIONS.impl("tree_attention", _forward, "CPU")


def backward(
    grad_SHE: Tensor,
    q_SHE: Tensor,
    k_SKE: Tensor,
    v_SKE: Tensor,
    out_SHE: Tensor,
    lse_SH: Tensor,
    parts_P4: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given that of the outputs."""
    delta = torch.linalg.vecdot(grad_SHE, out_SHE)
    grads = torch.zeros_like(q_SHE), torch.zeros_like(k_SKE), torch.zeros_like(v_SKE)
    built = library()
    assert built is not None
    tensors = (grad_SHE, q_SHE, k_SKE, v_SKE, lse_SH, delta, *grads)
    _for_each_head(built.backward, tensors, parts_P4, k_SKE, q_SHE.shape[1], scale)
    grads[0].mul_(scale)
    return grads


def _for_each_head(
    kernel: Callable[..., None],
    tensors: tuple[Tensor, ...],
    parts: Tensor,
    k_SKE: Tensor,
    H: int,
    scale: float,
) -> None:
    """Call the kernel for each head of keys and values, without the interpreter's lock."""
    assert all(x.is_contiguous() for x in (*tensors, parts)) and parts.dtype is torch.int64
    built = library()
    assert built is not None
    size = built.workspace()
    K, E = k_SKE.shape[1:]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors, parts)]
    numbers = [*map(ctypes.c_long, (len(parts), H, K, E)), ctypes.c_float(scale)]

    def one(head: int) -> None:
        space = torch.empty(size, dtype=torch.uint8)
        kernel(*pointers, *numbers, ctypes.c_long(head), ctypes.c_void_p(space.data_ptr()))

    threads = torch.get_num_threads()
    if threads == 1:
        for head in range(K):
            one(head)
    else:
        list(_pool(os.getpid(), threads).map(one, range(K)))


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return a pool that is kept, since starting threads takes 0.1 ms per call. One per process:
    threads do not survive a fork."""
    return ThreadPoolExecutor(threads, f"attention-{process}")

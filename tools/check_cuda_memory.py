"""The memory model of `ttrl.costs.memory` on CUDA against fake tensors: no GPU and no numbers, but
every allocation of a step.

    python tools/check_cuda_memory.py [--gpus N ...] [--positions N] [--layers N] [--kind KIND]
        [NAME ...]

A policy of a published shape is built of fake tensors (`torch._subclasses.FakeTensorMode`) and
takes the gradient of two microbatches by the recipe's own modules, checkpointing, autograd and
head; storages are counted while they live. PyTorch without CUDA refuses such tensors on "cuda":
they are on "cpu", where fake ones go no way that is for CPUs. Not the recipe's: attention is
PyTorch's flash attention, which keeps the tensors that FlexAttention keeps; the head's kernels,
which allocate what Triton's do; every position is trained; chunks are given.

    GB          the highest sum of live storages of a GPU in forward and backward pass, and the
                estimate of that
    ratio       estimated / counted

With several GPUs FSDP works as in the recipe, in the first of so many processes, over collectives
that do nothing (PyTorch's fake process group). The allocator's gaps and the context are in neither
figure. Exit status 1 where a ratio is off by more than a tenth.
"""

import argparse
import contextlib
import itertools
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  # what they return
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torchao.dtypes.nf4tensor import NF4Tensor, SubclassTensorArgs
from transformers import AutoConfig

from ttrl.configs import GRPOConfig
from ttrl.configs.recipe import NF4_BLOCK
from ttrl.costs.memory import Workload, training_memory
from ttrl.training.kernels import head_blocks
from ttrl.training.kernels.head_blocks import HeadWeights
from ttrl.training.models import blocks, transformers_decoder
from ttrl.training.models import expert_routing as routing
from ttrl.training.models.decoder import build_decoder
from ttrl.training.parallel.distributed import DATA, TENSOR, Ranks
from ttrl.training.parallel.sharding import shard
from ttrl.training.policy.activation_memory import checkpoint_layers
from ttrl.training.policy.lora import adapted, apply_lora, frozen_part, hold_base
from ttrl.training.policy.policy import HeadOptions, Policy

ARCHITECTURES = json.loads(
    (Path(__file__).parents[1] / "ttrl" / "costs" / "architectures.json").read_text()
)
MODELS = {"0.5B": "qwen2.5_0.5b", "7B": "qwen2.5_7b", "32B": "qwen2.5_32b", "70B": "llama3.3_70b"}
CLASSES = {
    "30B-A3B": "qwen3_30b_a3b",
    "gpt-oss-20b": "gpt_oss_20b",
    "Qwen3.5-9B": "qwen3.5_9b",
    "Qwen3.5-27B": "qwen3.5_27b",
}
"""Computed by transformers' own classes."""
SHAPES = MODELS | CLASSES
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, nothing recomputed": {"activation_checkpointing": False},
    "LoRA": {"lora_rank": 16},
    "LoRA, base in fp32": {"lora_rank": 16, "lora_base_dtype": "fp32"},
    "QLoRA": {"lora_rank": 16, "lora_base_dtype": "nf4"},
}


class Storages(TorchDispatchMode):
    """Counts the bytes of storages, from the operation that makes one to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def count(self, *values: Any) -> None:
        for tensor in tree_iter(values):
            for storage in get_untyped_storages(tensor) if isinstance(tensor, Tensor) else ():
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = 0
                    weakref.finalize(storage, self._forget, storage._cdata)
                self._measure(storage)

    def _measure(self, storage: torch.UntypedStorage) -> None:
        self.now += storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address)

    @contextlib.contextmanager
    def resized(self) -> Iterator[None]:
        """See what FSDP does to storages: no operation tells of it."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._measure(storage)

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the parts
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result


class AllTrained(Policy):
    """A policy with every position trained: which ones are is not known of fake tensors."""

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, *_: Any) -> Any:  # type: ignore[override]
        with torch.autocast(tokens_BT.device.type, self.compute_dtype, cache_enabled=False):
            rows: Any = SimpleNamespace(group_ids=tokens_BT, parent_ids=tokens_BT)
            h_BTD = self.decoder.hidden_states(tokens_BT, tokens_BT, rows)
            return self._head(
                h_BTD.flatten(0, 1),
                labels_BT.flatten(),
                HeadOptions(token_loss=lambda logprobs, _: -logprobs),
            )


class Kernels:
    """What `ttrl.training.kernels.fused_head` allocates."""

    @staticmethod
    def measure(raw_nV: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty(len(raw_nV)) for _ in range(3))

    @staticmethod
    def gradient(*_: Any) -> None: ...


@contextlib.contextmanager
def without_numbers() -> Iterator[None]:
    """Replace what asks fake tensors for numbers."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out

    def scan_all(theirs: Any, scan: Any, arguments: dict[str, Any], branches: None) -> Tensor:
        out: Any = theirs(**arguments)
        return out[0] if isinstance(out, tuple) else out

    def convolve_all(
        theirs: Any, hidden_states: Tensor, weight: Tensor, branches: None, **named: Any
    ) -> Tensor:
        out: Tensor = theirs(hidden_states, weight, **named)
        return out

    with (
        mock.patch.object(blocks, "attend", attend),
        mock.patch.object(transformers_decoder, "attend", attend),
        mock.patch.object(transformers_decoder, "branches_of", lambda *_: None),
        mock.patch.object(transformers_decoder, "branching_scan", scan_all),
        mock.patch.object(transformers_decoder, "branching_convolution", convolve_all),
        mock.patch.object(routing.Routing, "_watch", lambda *_: None),  # it counts tokens
        mock.patch.object(head_blocks, "fused_kernels", lambda _: Kernels),
        # CPUs have no such product.
        mock.patch.object(HeadWeights, "logits", lambda _, h_nD, buffer: buffer[: len(h_nD)]),
        mock.patch.object(Tensor, "item", lambda _: 1.0),
    ):
        yield


@contextlib.contextmanager
def first_of(count: int) -> Iterator[Ranks]:
    """Yield the first of so many processes, of which there are no others: collectives return at
    once.
    """
    if count == 1:
        yield Ranks(0, 1, torch.device("cpu"))
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        mesh = init_device_mesh("cpu", (count, 1), mesh_dim_names=(DATA, TENSOR))
        # A device that says in which dtype parameters are gathered.
        yield Ranks(0, count, torch.device("cuda"), mesh)
    finally:
        distributed.destroy_process_group()


def in_four_bits(weight: Tensor) -> nn.Parameter:
    """Return what `AdaptedLinear.quantise` holds of a weight: its search for the numbers has none
    to look at.
    """
    part = frozen_part(weight)
    blocks = part.numel() // NF4_BLOCK
    group = next(n for n in range(256, 0, -1) if blocks % n == 0)
    about = SubclassTensorArgs(
        part.shape, part.stride(), 0, torch.float32, torch.device("cpu"), False
    )
    scales = torch.empty(blocks, dtype=torch.int8)
    factors = torch.empty(blocks // group)
    data = torch.empty(part.numel() // 2, dtype=torch.uint8)
    own: Tensor = NF4Tensor(
        about, NF4_BLOCK, blocks, group, scales, factors, torch.empty(()), data, torch.empty(16)
    )
    if isinstance(weight, DTensor):
        own = DTensor(own, weight._spec, requires_grad=False)  # type: ignore[call-arg]
    return nn.Parameter(own, requires_grad=False)


def counted(model: dict[str, Any], config: GRPOConfig, positions: int, gpus: int = 1) -> int:
    """Return the highest bytes of live storages while a step's gradient is made, parameters and
    gradients among them.
    """
    with without_numbers(), first_of(gpus) as here, FakeTensorMode():
        decoder = build_decoder(AutoConfig.for_model(**model))
        if config.lora_rank is not None:
            apply_lora(decoder, config)
            hold_base(decoder, dict.fromkeys(decoder.state_dict(), torch.bfloat16), config)
        policy = AllTrained(
            decoder, num_output_chunks=config.num_output_chunks, compute_dtype=torch.bfloat16
        )
        shard(
            policy,
            config,
            here,
            lambda: config.activation_checkpointing and checkpoint_layers(decoder.layers, config),
        )
        for layer in adapted(policy).values() if config.lora_base_dtype == "nf4" else ():
            layer.weight = in_four_bits(layer.weight)
        tokens = torch.zeros(1, positions, dtype=torch.int64)
        with Storages() as storages, storages.resized():
            storages.count(list(policy.parameters()), list(policy.buffers()), tokens)
            for _ in range(2):
                policy(tokens, tokens).loss.backward()
        return storages.peak


def estimated(model: dict[str, Any], config: GRPOConfig, positions: int, gpus: int = 1) -> float:
    """Return the estimate of the same."""
    estimate = training_memory(
        model, config, Workload(positions, continued=False), device="cuda", ranks=gpus
    )
    parts = estimate.moments["gradient"]
    return sum(
        size for name, size in parts.items() if name not in ("context", "NCCL", "allocator's gaps")
    )


def config_of(kind: str, chunks: int) -> GRPOConfig:
    given = {
        "dtype": "bf16",
        "rows_per_microbatch": 1,
        "activation_checkpointing": True,
        "num_output_chunks": chunks,
    }
    return GRPOConfig(model="m", packed="p", output_dir="o", **given | KINDS[kind])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"models, of {', '.join(SHAPES)}; all unless given"
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument(
        "--layers", type=int, help="build so many of the model's layers: four bits take minutes"
    )
    parser.add_argument("--kind", choices=KINDS, help="all unless given")
    arguments = parser.parse_args()
    worst = 0.0
    print(f"{'model':11} {'':26} {'GPUs':>4} {'counted':>9} {'estimate':>9} {'ratio':>6}   (GB)")
    kinds = [kind for kind in KINDS if arguments.kind in (None, kind)]
    for name, kind, gpus in itertools.product(arguments.names or SHAPES, kinds, arguments.gpus):
        model = dict(ARCHITECTURES[SHAPES[name]])
        if arguments.layers is not None:
            model |= {"num_hidden_layers": arguments.layers, "layer_types": None}
        config = config_of(kind, -(-arguments.positions // 1024))
        found, said = (
            measure(model, config, arguments.positions, gpus) for measure in (counted, estimated)
        )
        worst = max(worst, abs(said / found - 1))
        print(
            f"{name:11} {kind:26} {gpus:4} {found / 1e9:9.2f} {said / 1e9:9.2f} "
            f"{said / found:6.2f}",
            flush=True,
        )
    return int(worst > 0.1)


if __name__ == "__main__":
    sys.exit(main())

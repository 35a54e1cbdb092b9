"""Take weights that lie in this machine's memory, where a trainer holds them out or a cluster has
brought them: the worker's half of their transfer (`ttrl.server.transfer`).

`MemoryEngine` is an engine of vLLM's own weight transfer (0.32), registered as "ttrl" by whoever
imports `ttrl.vllm_worker`, as every worker does:

    /init_weight_transfer_engine  {"init_info": {"memory": PATH}}   the worker maps it, or says why
                                  it cannot
    /start_weight_update, /update_weights {"update_info": {}}, /finish_weight_update

The memory is laid out as safetensors, in a file or the files of a folder. vLLM's own `load_weights`
narrows each tensor to what this worker holds, so of a mapped model it reads no more than that. A
GPU copies from here as from a file, also into a server that has woken its weights alone (sleep of
level 2). Has run on CPUs and on one H100.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ttrl.vllm_worker.reload import KeepDirectWrites, pack_again, unpack_experts

BACKEND = "ttrl"
_finish: Callable[..., None] = finalize_layerwise_reload
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_DTYPES |= {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class MappedWeights:
    """What lies in the memory at a path, under Hugging Face names. Raises OSError; ValueError where
    nothing of it does.
    """

    def __init__(self, path: str) -> None:
        files = sorted(Path(path).glob("*.safetensors")) if os.path.isdir(path) else [path]
        self._files = [_mapped(file) for file in files]
        if not files:
            raise FileNotFoundError(f"there are no weights in {path}")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for header, data in self._files:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                part = data[begin:end]
                dtype = _DTYPES[entry["dtype"]]
                # Other writers do not care.
                if part.data_ptr() % dtype.itemsize == 0:
                    aligned = part
                else:
                    aligned = part.clone()
                yield name, aligned.view(dtype).view(entry["shape"])


def _mapped(path: str | Path) -> tuple[dict[str, Any], Tensor]:
    """Return what a file says of its tensors, and the bytes of all of them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Writable for torch, which knows no other memory; what is written would be this process's
        # alone.
        memory = mmap.mmap(
            descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
    begin = 8 + int.from_bytes(memory[:8], "little")
    header: dict[str, Any] = json.loads(memory[8:begin])
    header.pop("__metadata__", None)
    return header, torch.frombuffer(memory, dtype=torch.uint8)[begin:]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the memory is."""

    memory: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: all of it is loaded at once."""


class MemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a model from mapped memory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _weights: MappedWeights | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._weights = MappedWeights(init_info.memory)

    def start_weight_update(self) -> None:
        unpack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what was mapped. On a CPU there is nothing to wait for, and PyTorch would raise."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._weights is None:
            raise RuntimeError(
                "/init_weight_transfer_engine comes first: it says where the weights are"
            )
        model: Any = self.model
        try:
            with disable_mtp_completeness_check(), KeepDirectWrites(model):
                model.load_weights(self.weights())
        except BaseException:
            _finish(self.model, self.model_config)  # layers that were not reached are as they were
            raise

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is loaded."""
        assert self._weights is not None
        yield from self._weights

    def finish_weight_update(self) -> None:
        _finish(self.model, self.model_config)
        pack_again(self.model)

    def shutdown(self) -> None:
        self._weights = None


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MemoryEngine)

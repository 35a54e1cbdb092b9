"""What goes wrong on the way to a server, on demand: loaded by vLLM in place of ttrl's own
extension of its worker.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

from torch import Tensor
from vllm.model_executor.model_loader.reload import inplace

from ttrl.vllm_worker import WeightSync
from ttrl.vllm_worker.memory import MemoryEngine


class FaultyWeightSync(WeightSync):
    """The file TTRL_TEST_FAULT says what happens: {"old": true}, {"tensor": NAME, "index": [0, 0],
    "add": 1e-4}, {"zero": NAME}, {"swap": [LAYER, LAYER]}, or {"break": true} in the middle of what
    is taken from memory.
    """

    def ttrl_load_weights(self, folder: str) -> None:
        fault = _fault()
        if fault.get("old"):
            return
        with self._ttrl_damaged(fault) if fault else contextlib.nullcontext():
            super().ttrl_load_weights(folder)

    def _ttrl_damaged(self, fault: dict) -> contextlib.AbstractContextManager[object]:
        def get_model_loader(config: object) -> object:
            loader = original(config)
            read = loader.get_all_weights

            loader.get_all_weights = lambda *arguments: _damaged(read(*arguments), fault)
            return loader

        original = inplace.get_model_loader
        return mock.patch.object(inplace, "get_model_loader", get_model_loader)


def _fault() -> dict:
    path = Path(os.environ["TTRL_TEST_FAULT"])
    return json.loads(path.read_text()) if path.exists() else {}


def _damaged(weights: Iterable[tuple[str, Tensor]], fault: dict) -> Iterator[tuple[str, Tensor]]:
    first, second = fault.get("swap", ("", ""))  # as "model.layers.3."
    other = {first: second, second: first} if first else {}
    for name, tensor in weights:
        if name == fault.get("tensor"):
            tensor = tensor.clone()
            tensor[tuple(fault["index"])] += fault["add"]
        if name == fault.get("zero"):
            tensor = tensor * 0
        yield (
            next(
                (other[part] + name.removeprefix(part) for part in other if name.startswith(part)),
                name,
            ),
            tensor,
        )


_weights = MemoryEngine.weights


def _weights_or_what_is_left(engine: MemoryEngine) -> Iterator[tuple[str, Tensor]]:
    fault = _fault()
    if fault.get("break"):
        yield from itertools.islice(_weights(engine), 3)
        raise ValueError("a fault of this test")
    if not fault.get("old"):
        yield from _damaged(_weights(engine), fault)


MemoryEngine.weights = _weights_or_what_is_left

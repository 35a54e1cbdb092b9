"""What goes wrong on the way to a server, on demand: loaded by vLLM in place of ttrl's own
extension of its worker.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from ttrl.vllm_worker import WeightSync


class FaultyWeightSync(WeightSync):
    """The file TTRL_TEST_FAULT says what happens: {"old": true}, {"tensor": NAME, "index": [0, 0],
    "add": 1e-4}, {"zero": NAME}, {"swap": [LAYER, LAYER]}, or {"break": true} in the middle of what
    is taken from memory.
    """

    def ttrl_load_weights(self, folder: str | None = None, memory: str | None = None) -> None:
        if not _fault().get("old"):
            super().ttrl_load_weights(folder, memory)

    def ttrl_read_weights(
        self, folder: str | None, memory: str | None
    ) -> Iterator[tuple[str, Tensor]]:
        fault = _fault()
        found = super().ttrl_read_weights(folder, memory)
        if fault.get("break") and memory is not None:
            yield from itertools.islice(found, 3)
            raise ValueError("a fault of this test")
        yield from _damaged(found, fault)


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

"""What goes wrong on the way to a server, on demand: loaded by vLLM in place of ttrl's own extension of its worker."""

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

from vllm.model_executor.model_loader.reload import inplace

from ttrl.vllm_worker import WeightSync


class FaultyWeightSync(WeightSync):
    """The file TTRL_TEST_FAULT says what happens: {"old": true}, {"tensor": NAME, "index": [0, 0], "add": 1e-4},
    {"zero": NAME}, or {"swap": [LAYER, LAYER]}."""

    def ttrl_load_weights(self, folder: str) -> None:
        path = Path(os.environ["TTRL_TEST_FAULT"])
        fault = json.loads(path.read_text()) if path.exists() else {}
        if fault.get("old"):
            return
        with self._ttrl_damaged(fault) if fault else contextlib.nullcontext():
            super().ttrl_load_weights(folder)

    def _ttrl_damaged(self, fault: dict) -> contextlib.AbstractContextManager[object]:
        def get_model_loader(config: object) -> object:
            loader = original(config)
            read = loader.get_all_weights

            def damaged(*arguments: object) -> object:
                for name, tensor in read(*arguments):
                    if name == fault.get("tensor"):
                        tensor = tensor.clone()
                        tensor[tuple(fault["index"])] += fault["add"]
                    if name == fault.get("zero"):
                        tensor = tensor * 0
                    yield next((other[part] + name.removeprefix(part) for part in other if name.startswith(part)), name), tensor

            loader.get_all_weights = damaged
            return loader

        first, second = fault.get("swap", ("", ""))  # as "model.layers.3."
        other = {first: second, second: first} if first else {}
        original = inplace.get_model_loader
        return mock.patch.object(inplace, "get_model_loader", get_model_loader)

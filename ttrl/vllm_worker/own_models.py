"""Let vLLM serve the models whose modelling files are ours, by its backend for transformers'
classes.

That backend looks classes up in transformers, and takes one window for all layers from a config.
Both are extended here: our class is found, and each layer has the window that the config gives it.

Has never run on a GPU.
"""

import importlib
import re
from typing import Any

import transformers

from ttrl.nanochat import modeling


def serve_own_models() -> None:
    """Make the classes known, in whichever of vLLM's processes this is called; harmless if
    repeated.
    """
    modeling.register()
    if hasattr(transformers, modeling.ARCHITECTURE):
        return
    # Where vLLM looks classes up.
    setattr(transformers, modeling.ARCHITECTURE, modeling.Nanochat2026ForCausalLM)
    base: Any = importlib.import_module("vllm.model_executor.models.transformers.base").Base
    theirs = base._get_attn_cls

    def with_windows(self: Any) -> Any:
        """Return vLLM's attention, with the window that the model's config gives each layer."""
        attention = theirs(self)
        windows = getattr(self.text_config, "attention_windows", None)
        if windows is None:
            return attention

        def make(**given: Any) -> Any:
            number = re.search(r"\.layers\.(\d+)\.", f".{given['prefix']}.")
            assert number is not None, given["prefix"]
            return attention(**given, per_layer_sliding_window=windows[int(number[1])])

        return make

    base._get_attn_cls = with_windows

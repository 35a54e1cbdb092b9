"""Let vLLM serve models with modelling files of ours, by its backend for transformers' classes.

This backend looks classes up in transformers, and takes one window for all layers from a config.
Both are extended here: our class is found, and each layer has its own window from the config.

Never run on a GPU.
"""

import importlib
import re
from typing import Any

import transformers

from ttrl.nanochat import modeling


def serve_own_models() -> None:
    """Register the classes in the current vLLM process; harmless if repeated."""
    modeling.register()
    if hasattr(transformers, modeling.ARCHITECTURE):
        return
    # For vLLM's lookup of classes.
    setattr(transformers, modeling.ARCHITECTURE, modeling.Nanochat2026ForCausalLM)
    base: Any = importlib.import_module("vllm.model_executor.models.transformers.base").Base
    theirs = base._get_attn_cls

    def with_windows(self: Any) -> Any:
        """Return vLLM's attention, with each layer's window from the model's config."""
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

"""Extend vLLM's worker processes: load weights in place, compare them with the files, share
prompts.
"""

import os

from ttrl.vllm_worker.served_weights import WeightSync

OWN_MODEL_VARIABLE = "TTRL_SERVES_OWN_MODEL"
"""Set by `ttrl.vllm_worker.api_server` for a model with a modelling file of ours."""
if os.environ.get(OWN_MODEL_VARIABLE):  # workers import this before they make a model
    from ttrl.vllm_worker.own_models import serve_own_models

    serve_own_models()

__all__ = ["OWN_MODEL_VARIABLE", "WeightSync"]

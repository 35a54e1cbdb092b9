"""Runs inside vLLM's worker processes: new weights in place, their comparison with the files,
shared prompts.
"""

import os

from ttrl.vllm_worker.served_weights import WeightSync

OWN_MODEL_VARIABLE = "TTRL_SERVES_OWN_MODEL"
"""Set by `ttrl.vllm_worker.api_server` for a model whose modelling file is ours."""
if os.environ.get(OWN_MODEL_VARIABLE):  # workers import this before they make a model
    from ttrl.vllm_worker.own_models import serve_own_models

    serve_own_models()

__all__ = ["OWN_MODEL_VARIABLE", "WeightSync"]

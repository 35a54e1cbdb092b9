"""nanochat's models: a modelling file for trainer and server alike, and a reader of its own
checkpoints.
"""

MODEL_TYPE = "nanochat_2026"
OWN_MODEL_TYPES = frozenset({MODEL_TYPE})
"""Models without a class in transformers or vLLM."""

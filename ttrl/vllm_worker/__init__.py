"""Runs inside vLLM's worker processes: new weights in place, their comparison with the files, shared prompts."""

from ttrl.vllm_worker.weights import WeightSync

__all__ = ["WeightSync"]

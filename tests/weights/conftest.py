"""Servers that pretend to be vLLM, and checkpoints for them."""

from support.fake_vllm import checkpoints, fake_server

__all__ = ["checkpoints", "fake_server"]

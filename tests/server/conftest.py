"""Servers that pretend to be vLLM, and checkpoints for them."""

import pytest
from support.fake_vllm import FakeVLLM, write_checkpoint

from ttrl.server.vllm import VLLMServer


@pytest.fixture
def checkpoints(tmp_path):
    return write_checkpoint(tmp_path / "old", 0.5), write_checkpoint(tmp_path / "new", 0.75)


@pytest.fixture
def fake_server(tmp_path, checkpoints):
    """A function that makes a server (not started yet) with a behaviour; all are stopped at the
    end.
    """
    made: list[VLLMServer] = []

    def make(behaviour: str = "fine", **arguments) -> VLLMServer:
        arguments = {
            "served_model_name": "m",
            "log_path": tmp_path / "server.log",
            "dtype": "float32",
            **arguments,
        }
        server = FakeVLLM(checkpoints[0], **arguments)
        server.behaviour = behaviour
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()

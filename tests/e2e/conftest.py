"""Servers and processes that several files share; tests/conftest.py keeps such files on one worker
of pytest-xdist.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.recipe_worker import RecipeWorker

from ttrl.server.vllm import VLLMServer
from ttrl.tiny_model import make_tiny_model

READER = """
import json, sys, traceback
for line in sys.stdin:
    code, given = json.loads(line)
    names = {"given": given}
    try:
        exec(code, names)
        said = {"found": names["found"]}
    except BaseException:
        said = {"error": traceback.format_exc()[-3000:]}
    print("JSON" + json.dumps(said), flush=True)
"""


@pytest.fixture(scope="session")
def in_vllm() -> Iterator[Callable[..., Any]]:
    """Executes code that takes `given` and makes `found`, in a process of its own: vLLM takes ten
    seconds to import.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None

    def execute(code: str, given: Any = None) -> Any:
        process.stdin.write(json.dumps([code, given]) + "\n")
        process.stdin.flush()
        while not (line := process.stdout.readline()).startswith("JSON"):
            assert line, "the process ended"
        said = json.loads(line.removeprefix("JSON"))
        assert "error" not in said, said["error"]
        return said["found"]

    yield execute
    process.stdin.close()
    process.wait(60)


@pytest.fixture(scope="session")
def recipe_worker() -> Iterator[RecipeWorker]:
    """For test_recipes.py and test_resident.py."""
    with RecipeWorker() as worker:
        yield worker


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `byte_server`, in a folder that has room for others."""
    from support.tiny_models import make_byte_model

    model: Path = make_byte_model(tmp_path_factory.mktemp("bytes") / "first", seed=1)
    return model


@pytest.fixture(scope="session")
def byte_server(byte_model: Path) -> Iterator[VLLMServer]:
    """For test_server.py and test_partial.py."""
    log = byte_model.parent / "server.log"
    with VLLMServer(
        byte_model, served_model_name="policy", log_path=log, dtype="float32", max_model_len=512
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """For test_sync.py, which puts its weights back, and for test_rollouts.py,
    test_shared_prompts.py and test_judges.py.

    The file fault.json beside its log says what goes wrong (support/faulty_worker.py).
    """
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(
        folder / "model", seed=1, layers=2, width=64, heads=2, context=4096, tied=True
    )
    here = str(Path(__file__).parents[1])
    with VLLMServer(
        model,
        served_model_name="m",
        other_names=["policy"],
        log_path=folder / "server.log",
        dtype="float32",
        extra_args={"worker_extension_cls": "support.tried_worker.Tried"},
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "TTRL_TEST_FAULT": str(folder / "fault.json"),
        },
    ) as server:
        yield server

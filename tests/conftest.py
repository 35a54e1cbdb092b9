"""Settings for all tests."""

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from support.results_file import VARIABLE, ResultsFile

if TYPE_CHECKING:
    from support.world import World

# tests/gpu runs on machines that have pytest and nothing else of the dev extra.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Machines are noisy: a slow example is no failure. Examples are new ones in CI, too, where
    # hypothesis would repeat them.
    slow = [HealthCheck.too_slow]
    settings.register_profile("ttrl", deadline=None, suppress_health_check=slow, derandomize=False)
    # A property that fails once in a thousand examples is not the fault of the change under test.
    settings.register_profile("short", settings.get_profile("ttrl"), derandomize=True)
    settings.load_profile("ttrl")

# A shell starts what is put into the background with Ctrl-C ignored, and every process below
# inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --short, with which `make test` runs; `make test-all` runs without it."""
    told = "leave out tests marked long, and try properties on a few examples, the same each time"
    parser.addoption("--short", action="store_true", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """Keep results in the file that TTRL_TEST_RESULTS names.

    Also know the marker of pytest-timeout where that is missing, and choose hypothesis's profile.
    """
    if config.getoption("short") and importlib.util.find_spec("hypothesis") is not None:
        settings.load_profile("short")
    config.addinivalue_line(
        "markers", "timeout(seconds): how long the test may take; kept by pytest-timeout"
    )
    if path := os.environ.get(VARIABLE):
        is_worker = hasattr(config, "workerinput")  # of xdist
        config.pluginmanager.register(ResultsFile(path, writes=not is_worker))


def is_long(item: pytest.Item) -> bool:
    """Tell whether --short leaves a test out.

    `@pytest.mark.long` says so of a test or of a `pytest.param`, and `long(but=[ID, ...])` of all
    parameters of a test except these.
    """
    marker = item.get_closest_marker("long")
    if marker is None:
        return False
    parameters = getattr(item, "callspec", None)
    return parameters is None or parameters.id not in marker.kwargs.get("but", ())


def check_kept_parameters(items: list[pytest.Item]) -> None:
    """Raise UsageError where `long(but=[...])` names parameters that a test does not have.

    Else a test whose parameters are renamed would be left out whole, and nobody would notice.
    """
    parameters: dict[str, set[str]] = {}
    kept: dict[str, set[str]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        marker = item.get_closest_marker("long")
        if spec is None:
            continue
        test = item.nodeid.partition("[")[0]
        parameters.setdefault(test, set()).add(spec.id)
        if marker is not None and "but" in marker.kwargs:
            kept[test] = set(marker.kwargs["but"])
    for test, names in kept.items():
        unknown = names - parameters[test]
        if unknown and len(parameters[test]) > 1:  # else one of them was asked for by its name
            there = ", ".join(sorted(parameters[test]))
            raise pytest.UsageError(
                f"{test}: long(but=...) keeps {', '.join(sorted(unknown))}; there are {there}"
            )


def try_fewer_examples(items: list[pytest.Item]) -> None:
    """Try a fifth of the examples of each property, the same each time: what they find, most often
    the first ones find.
    """
    for function in {
        getattr(item.obj, "__func__", item.obj)
        for item in items
        if isinstance(item, pytest.Function)
    }:
        if getattr(function, "is_hypothesis_test", False):
            own = function._hypothesis_internal_use_settings
            function._hypothesis_internal_use_settings = settings(
                own, max_examples=max(5, own.max_examples // 5)
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests where --short is given, and begin with the slowest.

    Else one worker would be left with a slow test at the end. A test's time limit tells how long it
    may take.
    """
    if config.getoption("short"):
        check_kept_parameters(items)
        left_out = {item for item in items if is_long(item)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        try_fewer_examples(items)

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker is not None else 0.0

    items.sort(key=limit, reverse=True)


SERVED_TOGETHER = (
    ("tests/e2e/test_server.py", "tests/e2e/test_partial.py"),
    (
        "tests/e2e/test_sync.py",
        "tests/e2e/test_rollouts.py",
        "tests/e2e/test_shared_prompts.py",
        "tests/e2e/test_judges.py",
    ),
    ("tests/e2e/test_recipes.py", "tests/e2e/test_resident.py"),
    (
        "tests/e2e/test_tools.py",
        "tests/e2e/test_chat_requests.py",
        "tests/e2e/test_vllm_arguments.py",
    ),
)
"""Files that share a server, or a process that has imported what they need (tests/e2e/conftest.py).
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let `--dist loadfile` give files that share something to the same worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    first = {name: names[0] for names in SERVED_TOGETHER for name in names}

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = super()._split_scope(nodeid)
            return first.get(name, name)

    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all tests without looking for garbage, of which there is none, in ever more objects: a
    third of that time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What the imports made stays for ever: `gc.collect()` in a test need not look through all of
    torch, half a second long.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of httpx reads the certificates of all authorities when it is made (50 ms);
    tests speak to themselves.
    """
    if importlib.util.find_spec("certifi") is None:
        yield
        return
    import certifi

    with open(certifi.where(), encoding="utf-8") as file:
        first, end, _ = file.read().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(autouse=True)
def no_power_loss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not outlive one, so nothing waits for the disk (7 ms each time: half of the time of
    runs on fake parts). What is fsynced when is tested with functions in its place."""
    if request.node.get_closest_marker("e2e") is None:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def s3_server_command() -> list[str] | None:
    """moto of this Python, or the command of an installation of its own, on PATH or named by
    TTRL_TEST_MOTO_SERVER.
    """
    if (
        importlib.util.find_spec("moto") is not None
        and importlib.util.find_spec("flask") is not None
    ):
        return [sys.executable, "-m", "moto.server"]
    found = os.environ.get("TTRL_TEST_MOTO_SERVER") or shutil.which("moto_server")
    return [found] if found else None


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running S3 server (moto's)."""
    command = s3_server_command()
    if command is None:
        pytest.skip(
            'no S3 server: pip install "moto[s3,server]", here or in an environment of its own '
            "on PATH"
        )
    from support.network_hosts import held_port

    with held_port() as port:
        with (tmp_path_factory.mktemp("moto") / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
            )
        try:
            for _ in range(600):
                assert process.poll() is None, f"the S3 server ended at once; see {log.name}"
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
                    break
                except urllib.error.HTTPError:
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """s3:// address of a new bucket; the server and the credentials are in the environment."""
    name = f"bucket-{uuid4().hex[:12]}"
    urllib.request.urlopen(
        urllib.request.Request(f"{s3_server}/{name}", method="PUT"), timeout=30
    ).close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    return f"s3://{name}/some/folder"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model hub whose name nobody knows."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")


@pytest.fixture(scope="session")
def one_thread() -> None:
    """More threads than idle cores make tiny models hundreds of times slower."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def short_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of a tiny checkpoint would be theirs."""
    monkeypatch.setattr("ttrl.training.trainer_canary.CANARY_LENGTH", 3)
    monkeypatch.setattr("ttrl.training.trainer_canary.GREEDY_LENGTH", 1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes, once, the folder of a tiny random model of a family."""
    import check_parity

    made: dict[str, Path] = {}

    def make(family: str = "qwen2") -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            check_parity.make_folder(family, folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture
def float64_reference() -> Iterator[Callable[[Path], Any]]:
    """Loads transformers' model in float64 throughout."""
    import check_parity
    import torch

    with check_parity.softmax_keeps_dtype():
        yield lambda folder: check_parity.reference_model(folder, torch.float64)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template."""
    from ttrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "model", layers=1, width=16, heads=1)


@pytest.fixture
def world(tmp_path: Path, tiny_model: Path) -> "World":
    """A run on fake parts."""
    from support.world import World

    return World(tmp_path, tiny_model)

"""A server for runs on other hosts."""

import collections
import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl import TrainConfig, cli
from ttrl.errors import ServerDiedError, ServerError, UserError
from ttrl.records import Canary
from ttrl.server import serve as serve_module
from ttrl.server.auth import derived
from ttrl.server.connection import JoinedServer
from ttrl.server.parsers import Parsers
from ttrl.server.serve import read_or_make_key, serve, vllm_arguments
from ttrl.weights.canary import check_canary


def test_the_key_is_made_once_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "new" / "key"
    key = read_or_make_key(path)
    assert len(key) > 40 and path.stat().st_mode & 0o777 == 0o600
    assert read_or_make_key(path) == key != read_or_make_key(tmp_path / "other")
    path.chmod(0o640)
    with pytest.raises(
        UserError, match=r"others can read it: mode 640; make it private: chmod 600"
    ):
        read_or_make_key(path)
    path.chmod(0o600)
    for text in ("", "short", "two words of which"):
        path.write_text(text)
        with pytest.raises(UserError, match="does not hold a key"):
            read_or_make_key(path)


def test_arguments_for_vllm():
    given = [
        "tensor_parallel_size=2",
        "enforce_eager=true",
        "distributed_executor_backend=ray",
        'x={"a": [1]}',
    ]
    expected = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "distributed_executor_backend": "ray",
        "x": {"a": [1]},
    }
    assert vllm_arguments(given) == expected
    with pytest.raises(UserError, match="write NAME=VALUE"):
        vllm_arguments(["enforce_eager"])


def test_the_command_names_what_it_does(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(
        serve_module, "serve", lambda model, **settings: seen.update(settings, model=model)
    )
    assert (
        cli.main(["serve", "m", "--key-file", str(tmp_path / "key"), "--vllm", "max_num_seqs=3"])
        == 0
    )
    assert seen["host"] == "127.0.0.1" and seen["port"] is None  # the user names any other address
    assert seen["arguments"] == {"max_num_seqs": 3} and seen["model"] == seen["name"] == "m"
    assert (
        seen["dtype"]
        == TrainConfig(run="r", model="m", iterations=1).resolved(cuda=False).dtype
        == "fp32"
    )
    assert cli.main(["serve", "m", "--vllm", "x"]) == 2
    folder = "ttrl.server.model_folder.local_folder"
    monkeypatch.setattr(folder, lambda name, **_: tmp_path / name)
    assert cli.main(["serve", "m", "--adapters", "s3://bucket/run"]) == 0
    # The files that the run has.
    assert (seen["model"], seen["adapters_from"]) == (str(tmp_path / "m"), "s3://bucket/run")
    assert seen["name"] == "m"  # as it was typed, whatever folder that is


def until_it_serves(said, then=lambda: None):
    """A `say` that remembers the lines; after the last one of a start it calls `then`, and presses
    Ctrl-C.
    """

    def say(line):
        said.append(line)
        if line.startswith("a run joins it"):
            then()
            raise KeyboardInterrupt

    return say


def test_one_that_fetches_adapters(tmp_path, checkpoints):
    """It says so to the run, is given room for them, and is not started where they cannot be
    read.
    """
    made, said = [], []

    class Made(contextlib.nullcontext):
        root_url, port, dtype, log_path = "http://127.0.0.1:1", 1, "float32", "log"
        other_names = ("old",)
        parsers = Parsers({}, "tool calls: no parser")

    def make(model, **settings):
        made.append(settings)
        return Made()

    settings = {"key_file": tmp_path / "key", "log_path": tmp_path / "log", "make_server": make}
    settings["say"] = until_it_serves(said)
    store = (tmp_path / "store").as_uri()
    for arguments in (None, {"max_lora_rank": 8}):
        with pytest.raises(KeyboardInterrupt):
            serve(str(checkpoints[0]), adapters_from=store, arguments=arguments, **settings)
    assert [one["extra_args"] for one in made] == [{"max_lora_rank": 64}, {"max_lora_rank": 8}]
    assert made[0]["adapters_from"] == store
    assert any(
        'joined_servers=["http://127.0.0.1:1"], adapters="mirror" and that key' in line
        for line in said
    )
    assert any(line.endswith("a run's adapter is called 'policy-adapter'") for line in said)
    with pytest.raises(KeyboardInterrupt):
        serve(str(checkpoints[0]), **settings)
    assert made[2]["adapters_from"] is None and made[2]["extra_args"] is None
    with pytest.raises(UserError, match="cannot be at"):
        serve(str(checkpoints[0]), adapters_from="ftp://h/run", **settings)
    with pytest.raises(
        UserError,
        match="on one machine, because they are fetched to it; leave out "
        "distributed_executor_backend=ray",
    ):
        serve(
            str(checkpoints[0]),
            adapters_from=store,
            arguments={"distributed_executor_backend": "ray"},
            **settings,
        )
    assert len(made) == 3


def test_it_is_started_anew_when_it_dies_but_not_for_ever(fake_server, checkpoints, tmp_path):
    """It keeps address and key, and is open to no weights."""
    made = []

    def make(model, **settings):
        assert (settings.pop("host"), settings.pop("port"), str(model)) == (
            "127.0.0.1",
            None,
            str(checkpoints[0]),
        )
        made.append(fake_server("fine", **settings))
        return made[0]

    said, errors, served_again = [], [], threading.Event()

    def say(text):
        said.append(text)
        if text.startswith("serving"):
            (served_again if "again" in text else first).set()

    first = threading.Event()
    settings = {
        "key_file": tmp_path / "key",
        "log_path": tmp_path / "serve.log",
        "say": say,
        "make_server": make,
        "look_seconds": 0.05,
        "most_restarts": 1,
    }

    def run():
        try:
            serve(str(checkpoints[0]), **settings)
        except ServerDiedError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert first.wait(60)
    [server] = made
    url, key = server.root_url, server.api_key
    assert key == (tmp_path / "key").read_text().strip() and key not in "\n".join(said)
    server.open_to("v1")
    os.kill(server._child.pid, signal.SIGKILL)
    assert served_again.wait(60)
    assert (server.root_url, server.api_key, server.open_version()) == (url, key, None)
    os.kill(server._child.pid, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive() and len(errors) == 1 and not server.is_started
    assert said[1] == f"serving at {url}/v1; the model's name is 'policy' and '{checkpoints[0]}'"
    assert said[3].endswith(f"export OPENAI_API_KEY=$(cat {tmp_path / 'key'})")


@pytest.mark.parametrize("adapters", [False, True])
def test_a_client_may_use_the_name_that_was_typed(adapters, fake_server, checkpoints, tmp_path):
    """So may a run, which asks for "policy" or for its adapter; vLLM answers any other name with
    404.
    """

    def ask(url, key, name):
        body = {"model": name, "prompt": [3, 4], "max_tokens": 1}
        server = JoinedServer(url, served_model_name=name, dtype="float32", api_key=key)
        server.check()
        return server._http("POST", "/v1/completions", body, 10.0)[0]

    made = []

    def make(model, **settings):
        made.append(fake_server("fine", **settings))
        return made[-1]

    def look():
        (server,) = made
        there = {"dtype": "float32", "api_key": server.api_key}
        run = JoinedServer(server.root_url, served_model_name="policy", **there)
        listed = [one["id"] for one in run.request("GET", "/v1/models")["data"]]
        statuses = [
            ask(server.root_url, server.api_key, name) for name in ("policy", "org/typed", "other")
        ]
        seen.extend([listed, statuses, check_canary(run, Canary.load(checkpoints[0]))])
        if adapters:
            adapter = {"lora_name": "policy-adapter", "lora_path": str(checkpoints[1] / "adapter")}
            run.request("POST", "/v1/load_lora_adapter", adapter)
            seen.append([one["id"] for one in run.request("GET", "/v1/models")["data"]])

    seen, said = [], []
    store = {"adapters_from": (tmp_path / "store").as_uri()} if adapters else {}
    with pytest.raises(KeyboardInterrupt):
        serve(
            str(checkpoints[0]),
            name="org/typed",
            key_file=tmp_path / "key",
            log_path=tmp_path / "serve.log",
            dtype="float32",
            say=until_it_serves(said, look),
            make_server=make,
            **store,
        )
    names = ["policy", "org/typed"]
    assert seen[0] == names and seen[1] == [200, 200, 404]
    assert seen[2].passed
    assert seen[3:] == [[*names, "policy-adapter"]] * adapters
    assert "the model's name is 'policy' and 'org/typed'" in said[1]


def test_it_says_a_name_of_its_weights_for_caches(tmp_path):
    said = []
    serve_module._say_digest("org/some-model", "float32", said.append)
    # No model folder: vLLM has said why.
    serve_module._say_digest(str(tmp_path), "float32", said.append)
    assert len(said) == 1 and said[0].endswith("--weights-digest hub:org/some-model/float32")


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"no HTTP\r\n\r\n"]
)
def test_one_that_dies_in_the_middle_of_an_answer_is_gone(answer):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_twice():
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_twice)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = JoinedServer(url, served_model_name="m", dtype="float32", api_key="k" * 20)
        server.api_key = "it has proven before that it knows it"
        with pytest.raises(ServerDiedError, match="cannot be reached"):
            server.request("GET", "/v1/models")
        thread.join()


@pytest.mark.parametrize(
    ("part", "pause", "why"),
    [(b" " * 2**20, 0, "sent more than 2 MiB"), (b" ", 0.02, r"not complete after 0\.3 s")],
)
def test_an_answer_without_an_end_is_not_waited_for(part, pause, why):
    class Frugal(JoinedServer):
        most_bytes = 2**21

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            there, _ = listening.accept()
            with there, contextlib.suppress(OSError):
                there.recv(4096)
                there.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    there.sendall(part)
                    time.sleep(pause)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = Frugal(url, served_model_name="m", dtype="float32", api_key="k" * 20)
        with pytest.raises(OSError, match=why):
            server._http("GET", "/health", None, 0.3, with_key=False)
        thread.join()


def test_one_that_has_proven_itself_is_given_its_own_key_alone():
    keys = collections.defaultdict(set)

    class Proving(ChatHandler):
        def do_GET(self):  # noqa: N802 - the name of http.server
            path, _, number = self.path.partition("?")
            keys[path].add(self.headers["Authorization"])
            self.send({"name": "one", "proof": derived("k" * 20, "proof", number, "one")})

    with threaded(Proving) as url:
        server = JoinedServer(url, served_model_name="m", dtype="float32", api_key="k" * 20)
        server.request("GET", "/v1/models")
    own = derived("k" * 20, "key", "one")
    assert own != "k" * 20
    assert keys["/ttrl/proof"] == {None} and keys["/v1/models"] == {f"Bearer {own}"}
    assert keys["/health"] <= {None, f"Bearer {own}"}


@pytest.mark.parametrize("redirects", [False, True])
def test_whoever_has_taken_its_address_is_told_no_key(redirects):
    """A program that plays its part with a proof of yesterday, or sends us to another server for
    one.
    """
    heads = []

    class Squatter(ChatHandler):
        def do_GET(self):  # noqa: N802 - the name of http.server
            heads.append(dict(self.headers))
            path, _, number = self.path.partition("?")
            number = number if path == "/another" else "of yesterday"
            self.send(
                {"name": "one", "proof": derived("k" * 20, "proof", number, "one")},
                status=307 if redirects and path == "/ttrl/proof" else 200,
                headers={"Location": self.path.replace("/ttrl/proof", "/another")},
            )

    with (
        threaded(Squatter) as url,
        pytest.raises(ServerDiedError, match="does not prove its key"),
    ):
        server = JoinedServer(url, served_model_name="m", dtype="float32", api_key="k" * 20)
        server.request("GET", "/v1/models")
    assert heads and not any("Authorization" in head for head in heads)


def test_a_key_that_cannot_be_stored_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/sub/key cannot be made: Not a directory"):
        read_or_make_key(tmp_path / "file" / "sub" / "key")


@pytest.mark.parametrize(
    ("host", "is_open"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_who_can_reach_it_is_said(host, is_open, tmp_path, checkpoints):
    said = []

    class Made(contextlib.nullcontext):
        root_url, port, dtype, log_path = "http://127.0.0.1:17", 17, "float32", "log"
        other_names = ()
        parsers = Parsers({}, "tool calls: no parser")

    settings = {"key_file": tmp_path / "key", "log_path": tmp_path / "log"}
    with pytest.raises(KeyboardInterrupt):
        serve(
            str(checkpoints[0]),
            host=host,
            make_server=lambda *_, **__: Made(),
            say=until_it_serves(said),
            **settings,
        )
    lines = "\n".join(said)
    assert ("other hosts can reach it at 0.0.0.0 over plain HTTP" in lines) == is_open
    if is_open:
        assert f"http://{socket.gethostname()}:17/v1" in lines
    else:
        assert "http://127.0.0.1:17/v1" in lines


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([(503, b"")], r"its engine is dead \(/health answers 503\)"),
        ([(200, b""), (200, b"[]")], "it does not prove its key: it has another one"),
        ([(200, b""), (200, b"{")], "it does not prove its key"),
    ],
)
def test_a_joined_server_proves_itself_or_is_gone(answers, why):
    left = list(answers)

    class Answering(ChatHandler):
        def do_GET(self):  # noqa: N802 - the name of http.server
            status, body = left.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with threaded(Answering) as address:
        url = address.removesuffix("/v1")
        server = JoinedServer(url, served_model_name="m", dtype="float32", api_key="k" * 20)
        with pytest.raises(ServerDiedError, match=why):
            server.check()
        with pytest.raises(ServerError, match=r"the weights of .* are unknown; sync it first"):
            server.weights_digest()

"""Adapters that a server fetches from a run's mirror: what it takes, what it refuses, and what the
run makes of that.
"""

import asyncio
import functools
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from support.fake_vllm import write_checkpoint

from ttrl.errors import ServerDiedError, ServerError, UserError, WeightSyncError
from ttrl.server.connection import JoinedServer
from ttrl.server.sites import (
    ADAPTERS_PATH,
    ADAPTERS_VARIABLE,
    FetchAdapters,
    base_digests,
    base_problem,
    bring_adapter,
    check_store,
)
from ttrl.system.mirror_store import MirrorStore

KEY = "iterations/0001/checkpoint/adapter"


class QuickStore(MirrorStore):
    first_pause, part_bytes = 0.001, 7


class Site:
    """A server's middleware over a store, called as an ASGI application."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: str, tmp_path: Path):
        (tmp_path / "private").mkdir()
        self.store, self.folder, self.passed_on = (
            MirrorStore(address),
            tmp_path / "private" / "adapters",
            [],
        )
        self.model = write_checkpoint(tmp_path / "its model", 0.5)
        monkeypatch.setenv(
            ADAPTERS_VARIABLE, json.dumps([address, str(self.folder), str(self.model)])
        )

        async def vllm(scope, receive, send):
            self.passed_on.append(scope["path"])

        self.fetching = FetchAdapters(vllm, QuickStore)

    def put(self, number: int, **files: bytes) -> dict[str, list]:
        """Store files; return what a run would ask for."""
        found = {}
        for name, content in files.items():
            key = f"iterations/{number:04}/checkpoint/adapter/{name.replace('_json', '.json').replace('_st', '.safetensors')}"
            self.store.write(key, content)
            found[key] = [len(content), hashlib.sha256(content).hexdigest()]
        return found

    def ask(self, method="POST", path=ADAPTERS_PATH, body=b"{}", kind="http"):
        return asyncio.run(
            self._ask(
                method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), kind
            )
        )

    async def _ask(self, method, path, body, kind):
        sent, parts = [], [body[: len(body) // 2], body[len(body) // 2 :]]

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        await self.fetching(
            {"type": kind, "path": path, "method": method, "headers": []}, receive, send
        )
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


@pytest.fixture(params=["memory", "folder", "s3"])
def site(request, monkeypatch, tmp_path):
    kinds = {"memory": lambda: f"memory://{tmp_path}", "folder": (tmp_path / "store").as_uri}
    make = kinds.get(request.param, lambda: request.getfixturevalue("bucket"))
    return Site(monkeypatch, make(), tmp_path)


def test_what_the_run_has_stored_is_brought_once(site):
    asked = [
        site.put(number, model_st=b"weights %d" % number * 3, config_json=b"{}")
        for number in range(4)
    ]
    folders = []
    for files in asked:
        status, answer = site.ask(body=files)
        assert status == 200 and list(answer) == ["folder"]
        folders.append(Path(answer["folder"]))
        assert {path.name for path in folders[-1].iterdir()} == {"model.safetensors", "config.json"}
    assert folders[-1].joinpath("model.safetensors").read_bytes() == b"weights 3" * 3
    # What vLLM reads, and the one before.
    assert sorted(site.folder.iterdir()) == sorted(folders[-2:])
    site.store.remove(asked[3])
    # Asked again, as after a failed sync.
    assert site.ask(body=asked[3]) == (200, {"folder": str(folders[3])})
    assert not site.passed_on


def test_what_the_run_did_not_write_is_refused(site):
    files = site.put(1, model_st=b"weights", config_json=b"{}")
    for content in (b"Weights", b"w"):
        site.store.write(f"{KEY}/model.safetensors", content)
        status, answer = site.ask(body=files)
        assert status == 400 and "model.safetensors" in answer["error"]
    site.store.remove(files)
    status, answer = site.ask(body=files)
    assert status == 400 and answer["error"].startswith(
        f"{site.store.shown}: could not read {KEY}/model.safetensors"
    )
    assert not list(site.folder.iterdir())


@pytest.mark.parametrize(
    "files",
    [
        [],
        {},
        {"adapter/a.bin": [1, "x"]},  # vLLM would unpickle it
        {"adapter/../../a.json": [1, "x"]},
        {"/etc/a.json": [1, "x"]},
        {"adapter/.hidden.json": [1, "x"]},
        {"adapter/a\n.json": [1, "x"]},
        {"a/one.json": [1, "x"], "b/one.json": [1, "x"]},
        {"adapter/a.json": [-1, "x"]},
        {"adapter/a.json": [2**35, "x"]},
        {"adapter/a.json": ["many", "x"]},
        {"adapter/a.json": [float("inf"), "x"]},
        {"adapter/a.json": 1},
        b"no JSON",
        b" " * 2**21,
    ],
)
def test_nonsense_is_refused(monkeypatch, tmp_path, files):
    site = Site(monkeypatch, f"memory://{tmp_path}", tmp_path)
    status, answer = site.ask(body=files)
    assert (
        status == 400
        and answer["error"]
        and not site.folder.exists()
        and len(answer["error"]) < 1000
    )


def test_what_is_not_asked_of_it_goes_to_vllm(monkeypatch, tmp_path):
    site = Site(monkeypatch, f"memory://{tmp_path}", tmp_path)
    assert (
        site.ask(path="/v1/models") is None
        and site.ask(path=ADAPTERS_PATH, kind="websocket") is None
    )
    assert site.passed_on == ["/v1/models", ADAPTERS_PATH]


def test_it_says_which_model_is_its_base(monkeypatch, tmp_path):
    """By what a model computes with, whoever saved it, and whatever lies beside it."""
    site = Site(monkeypatch, f"memory://{tmp_path}", tmp_path)
    aside = site.model.rename(tmp_path / "not there yet")
    assert site.ask("GET")[0] == 400
    aside.rename(site.model)
    other = shutil.copytree(site.model, tmp_path / "another")
    (other / "README.md").write_text("words")
    (other / "training_args.bin").write_text("x")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"transformers_version": "6"}, indent=4))
    assert site.ask("GET") == (200, {"base": base_digests(other)})
    assert base_digests(other).keys() == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }


def test_a_store_that_cannot_be_read_is_found_before_vllm_is_started(
    s3_server, bucket, monkeypatch, tmp_path
):
    check_store(bucket)
    check_store(f"memory://{tmp_path}")
    check_store(str(tmp_path / "of a run that has not begun"))
    with pytest.raises(
        UserError, match=r"404 Not Found \(NoSuchBucket\); credentials come from the environment"
    ):
        check_store("s3://no-such-bucket/run")
    with pytest.raises(UserError, match="cannot be at"):
        check_store("ftp://h/run")
    with pytest.raises(UserError, match="contains credentials") as refused:
        check_store("s3://b/run?aws_secret_access_key=topsecret")
    assert "topsecret" not in str(refused.value)


# The run's side


@pytest.fixture
def joined(monkeypatch, tmp_path):
    """The run's side of a site, which it reaches without a network."""
    site = Site(monkeypatch, f"memory://{tmp_path}", tmp_path)
    base = shutil.copytree(site.model, tmp_path / "model")
    files, stored = site.put(1, model_st=b"weights"), []

    def publish(folder):
        stored.append(folder)
        if folder.parent.name == "full":
            raise OSError("s3://b: could not write: no room")
        return {**files, "iterations/0001/checkpoint/adapter/.nfs0001": (1, "x")}

    class Reached(JoinedServer):
        events: list[str] = []  # noqa: RUF012 - each test makes one
        refusal = 0

        def request(self, method, path, body=None, timeout=300.0, headers=None):
            if path != ADAPTERS_PATH:
                self.events.append(f"{method} {path}")
                return {"weights": None}
            status, answer = site.ask(method, body=body)
            if status != 200 or self.refusal:
                status = self.refusal or status
                raise ServerError(f"{method} {path}: the server answered {status}: {answer}")
            return answer

    bring = functools.partial(bring_adapter, publish=publish, base=base)
    settings = {"served_model_name": "policy", "dtype": "float32", "api_key": "k"}
    server = Reached("http://h:1", serves_adapters=True, bring=bring, **settings)
    return server, site, stored, files, base


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "iterations/0001/checkpoint"
    (folder / "adapter").mkdir(parents=True)
    return folder


def test_a_site_is_given_the_adapter_from_the_mirror(joined, checkpoint, tmp_path):
    server, site, stored, files, _ = joined
    with server.bring(checkpoint) as (folder,):
        assert stored == [checkpoint / "adapter"] and folder.parent == site.folder
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    with server.bring(tmp_path) as places:
        assert places == [tmp_path]  # the base alone, which it has
    shutil.rmtree(folder)
    site.store.remove(files)
    with (
        pytest.raises(ServerDiedError, match=r"could not read .*model.safetensors"),
        server.bring(checkpoint),
    ):
        pass
    full = checkpoint.rename(tmp_path / "full")
    with pytest.raises(ServerDiedError, match="no room"), server.bring(full):
        pass


def test_a_site_with_another_base_is_refused(joined, checkpoint):
    server, site, stored, _, base = joined
    assert base_problem(server, base) is None
    site.fetching._model = shutil.copytree(site.model, site.model.parent / "other")
    (site.fetching._model / "chat_template.jinja").write_text("another")
    (site.fetching._model / "tokenizer.json").unlink()
    wrong = r"differs from the run's starting model, .*: chat_template.jinja, tokenizer.json differ"
    with pytest.raises(WeightSyncError, match=wrong), server.bring(checkpoint):
        pass
    assert not stored


def test_a_server_that_knows_nothing_of_adapters_is_told_from_one_out_of_reach(joined, checkpoint):
    server = joined[0]
    server.refusal = 404
    wrong = "was not started with `ttrl serve MODEL --adapters ADDRESS`"
    with pytest.raises(WeightSyncError, match=wrong), server.bring(checkpoint):
        pass
    server.refusal = 504
    with pytest.raises(ServerDiedError, match="answered 504"), server.bring(checkpoint):
        pass


def test_a_server_that_was_started_anew_has_no_adapter(joined, tmp_path):
    """Requests before the next one is loaded go to the base."""
    server = joined[0]
    (tmp_path / "checkpoint" / "adapter").mkdir(parents=True)
    server.policy_folder = tmp_path / "checkpoint"
    assert server.model_name == "policy-adapter"
    server.close_to_all()
    assert server.model_name == "policy" and server.events[-2:] == [
        "GET /ttrl/weights",
        "DELETE /ttrl/weights",
    ]

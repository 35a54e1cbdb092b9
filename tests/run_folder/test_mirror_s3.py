"""The mirror of a run folder in a real S3 server (moto's), by address and with credentials from the
environment; and what S3 and Google's store ask of conditional writes, as they document it."""

import json
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.facts import mark

from ttrl import TrainConfig
from ttrl.errors import StorageError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.mirror import mirrored
from ttrl.system.mirror_store import MirrorStore


class QuickStore(MirrorStore):
    first_pause, part_bytes = 0.01, 5 * 2**20  # the smallest parts that S3 takes


def config(path, address):
    return TrainConfig(run=str(path), model="m", iterations=9, mirror=address)


def make_run(folder, size):
    for number, phase, names in (
        (0, "prepare", ["checkpoint"]),
        (1, "train", ["checkpoint", "state"]),
    ):
        for name in names:
            path = folder.iteration(number).path / name / "weights"
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes([number]) * size)
        mark(folder.iteration(number), phase, names, {"trained": True})


def test_a_run_goes_there_and_comes_back(bucket, tmp_path):
    """In parts, where files are larger than one."""
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    with first.locked(), mirrored(config(first.path, bucket), first, store_class=QuickStore):
        make_run(first, 11 * 2**20)
    keys = MirrorStore(bucket).keys()
    assert sorted(keys) == [
        "iterations/0000/checkpoint/weights",
        "iterations/0000/done/prepare.json",
        "iterations/0001/checkpoint/weights",
        "iterations/0001/done/train.json",
        "iterations/0001/state/weights",
        "owner.json",  # which says that it was released
    ]
    assert keys["iterations/0001/state/weights"] == 11 * 2**20
    with second.locked(), mirrored(config(second.path, bucket), second, store_class=QuickStore):
        second.iteration(1).verify("train")
        assert second.policy_version(5) == 1


def test_a_bucket_that_is_not_there(bucket, tmp_path, caplog):
    folder = RunFolder(tmp_path)
    words = r"s3://no-such-bucket/x: could not .*credentials come from the environment"
    with (
        folder.locked(),
        pytest.raises(StorageError, match=words),
        mirrored(config(tmp_path, "s3://no-such-bucket/x"), folder, store_class=QuickStore),
    ):
        pass
    assert "topsecret" not in caplog.text


class Objects(BaseHTTPRequestHandler):
    """One object of one store, and the conditions under which it is written."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def named(self):
        return {"ETag": f'"{self.server.number}"', "x_goog_generation": self.server.number}

    def do_PUT(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        there = 0 if server.content is None else server.number
        wanted = self.headers.get("x-goog-if-generation-match") or (
            self.headers.get("If-Match") or ""
        ).strip('"')
        conditional = wanted or self.headers.get("If-None-Match")
        if server.refusal is not None and conditional:
            return self.answer(*server.refusal)
        if self.headers.get("If-Match") and not there:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")  # as S3 does
        if conditional and int(wanted or 0) != there:
            return self.answer(412)
        server.content, server.number = body, server.number + 1
        return self.answer(200, **self.named())

    def do_GET(self):
        if self.server.content is None:
            return self.answer(404)
        return self.answer(
            200, self.server.content, Last_Modified=formatdate(usegmt=True), **self.named()
        )


@pytest.fixture
def objects(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    server.content, server.number, server.refusal = None, 100, None
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    key = {
        "gcs_base_url": address,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://bucket/x?allow_http=true"])
def test_an_owner_is_swapped_as_the_store_wants_it(objects, address):
    store = MirrorStore(address)
    first = store.swap("owner.json", b"1", None)
    assert store.swap("owner.json", b"other", None) is None
    second = store.swap("owner.json", b"2", first)
    assert (
        second is not None
        and store.swap("owner.json", b"3", first) is None
        and objects.content == b"2"
    )
    content, tag = store.read_tagged("owner.json")  # as one that takes over does
    assert content == b"2"
    third = store.swap("owner.json", b"taken", tag)
    assert (
        third is not None
        and store.swap("owner.json", b"3", second) is None
        and objects.content == b"taken"
    )
    objects.content = None  # removed by hand
    assert store.swap("owner.json", b"4", third) is None


@pytest.mark.parametrize(
    ("status", "code", "written"),
    [(501, "NotImplemented", True), (400, "Bad</Code><Id>A501", False)],
)
def test_only_a_store_without_conditions_is_written_without(objects, status, code, written):
    """An error that has the number in it, such as that of a request, is none of that."""
    objects.content, objects.refusal = (
        b"another's",
        (status, f"<Error><Code>{code}</Code></Error>".encode()),
    )
    store = MirrorStore("s3://bucket/x")
    if written:
        assert store.swap("owner.json", b"1", None) is not None
    else:
        with pytest.raises(OSError, match="400 Bad Request"):
            store.swap("owner.json", b"1", None)
    assert (objects.content == b"1") == written

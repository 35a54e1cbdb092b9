"""The logic of weight sync and canary against a stand-in server; the same against vLLM is in tests/e2e/test_server.py."""

import dataclasses
import json
import math
import re

import pytest

from ttrl.errors import ConfigError, ModelFolderError, ServerError, ServerStartError, WeightSyncError
from ttrl.server import weights
from ttrl.server.weights import Canary, check_canary, sync_weights, verify_canary


@pytest.mark.parametrize("mode", ["reload", "restart"])
def test_sync(fake_server, checkpoints, mode):
    old, new = checkpoints
    with fake_server() as server:
        pid = server._child.pid
        assert verify_canary(server, old).max_difference < 1e-9
        report = sync_weights(server, new, mode=mode)
        assert (report.mode, report.fell_back) == (mode, None) and report.canary_max_difference < 1e-9
        assert (server._child.pid == pid) == (mode == "reload")
        assert server.model_folder == new  # what a later restart loads
        assert not check_canary(server, Canary.load(old)).passed


@pytest.mark.parametrize(
    "behaviour, reason",
    [
        (
            "ignore-reload",
            r"largest .* 0\.275 > 0\.001 \(float32\).*prompt position 1 \(token 4\): server -4\.550000, trainer -4\.825",
        ),
        ("keep-cache", r"greedy token 0 \(1000\): server -1\.800000, trainer -1\.825000"),  # the prompt's logprobs are right
        ("refuse", "ServerError: POST /collective_rpc: the server answered 500: .*shape mismatch"),
    ],
)
def test_a_failed_reload_falls_back_to_a_restart(fake_server, checkpoints, behaviour, reason):
    with fake_server(behaviour) as server:
        report = sync_weights(server, checkpoints[1])
        assert report.mode == "restart" and report.canary_max_difference < 1e-9
        assert re.search(reason, report.fell_back), report.fell_back


def test_a_mismatch_after_the_restart_stops_with_both_numbers(fake_server, checkpoints):
    new = checkpoints[1]
    (new / "weight").write_text("0.76")  # the weights are not those that the trainer computed with
    with fake_server() as server:
        for mode in ("reload", "restart"):
            with pytest.raises(WeightSyncError, match=r"after a restart.*/new: .* server -\d\.836000, trainer -\d\.825000"):
                sync_weights(server, new, mode=mode)
    with fake_server() as server, pytest.raises(WeightSyncError, match="after its start"):
        verify_canary(server, new)


def test_nan_is_a_mismatch(fake_server, checkpoints):
    with fake_server("nan") as server:
        report = check_canary(server, Canary.load(checkpoints[0]))
        assert not report.passed and report.max_difference == math.inf and "server nan" in report.problem


def test_another_greedy_token_is_allowed_only_at_a_tie(fake_server, checkpoints):
    canary = Canary.load(checkpoints[0])
    with fake_server("other-token") as server:
        report = check_canary(server, canary)
        assert not report.passed and "greedy token 7" in report.problem and "server 5" in report.problem
        assert check_canary(server, dataclasses.replace(canary, greedy_margins=[1.0] * 7 + [5e-4])).passed
        assert not check_canary(server, dataclasses.replace(canary, greedy_margins=[5e-4] * 7 + [1.0])).passed


@pytest.mark.parametrize("shift, passes", [(0.0009, True), (0.0011, False), (-0.0011, False)])
def test_float32_tolerance(fake_server, checkpoints, shift, passes):
    canary = Canary.load(checkpoints[0])
    logprobs = [*canary.logprobs[:5], canary.logprobs[5] + shift, *canary.logprobs[6:]]
    with fake_server() as server:
        assert check_canary(server, dataclasses.replace(canary, logprobs=logprobs)).passed is passes
        server.dtype = "bfloat16"  # either side in half precision: one position alone may be off further
        assert check_canary(server, dataclasses.replace(canary, logprobs=logprobs)).passed


@pytest.mark.parametrize("shift, passes", [(0.04, True), (0.06, False)])
def test_half_tolerance_is_for_the_mean(fake_server, checkpoints, shift, passes):
    canary = Canary.load(checkpoints[0])
    moved = dataclasses.replace(
        canary,
        dtype="bfloat16",
        logprobs=[None] + [value + shift for value in canary.logprobs[1:]],
        greedy_logprobs=[value - shift for value in canary.greedy_logprobs],
    )
    with fake_server() as server:
        assert check_canary(server, moved).passed is passes


def test_a_server_that_stays_busy(fake_server, monkeypatch):
    monkeypatch.setattr(weights, "_DRAIN_SECONDS", 0.0)
    with fake_server() as server, pytest.raises(ServerError, match="are requests running"):
        weights.reset_prefix_cache(server)


def test_an_unknown_mode(fake_server, checkpoints):
    with pytest.raises(ConfigError, match="mode is 'hope'; it is 'reload' or 'restart'"):
        sync_weights(fake_server(), checkpoints[1], mode="hope")


def test_a_restart_that_fails(fake_server, checkpoints):
    with fake_server() as server:
        server.behaviour = "die"
        with pytest.raises(ServerStartError, match="root of it all"):
            sync_weights(server, checkpoints[1], mode="restart")


@pytest.mark.parametrize(
    "change, message",
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ("[]", "is damaged"),
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"logprobs": [None, -1.0]}, "37 token ids and 2 logprobs"),
        ({"logprobs": [None] * 37}, "not a finite number"),
        ({"greedy_margins": [1.0]}, r"greedy lists of lengths \[1, 8\]"),
        ({"token_ids": "x"}, "is damaged"),
    ],
)
def test_a_canary_that_cannot_be_used(checkpoints, change, message):
    path = checkpoints[0] / "canary.json"
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelFolderError, match=rf"canary\.json.*{message}.*without it nobody can tell"):
        Canary.load(checkpoints[0])

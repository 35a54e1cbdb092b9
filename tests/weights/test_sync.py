"""The logic of weight sync and canary against a stand-in server; the same against vLLM is in
tests/e2e/test_server.py.
"""

import contextlib
import dataclasses
import json
import math
import re
import shutil
import threading

import pytest

from ttrl.errors import (
    ModelFolderError,
    ServerDiedError,
    ServerError,
    ServerStartError,
    WeightSyncError,
)
from ttrl.loop import supervised_run
from ttrl.records import Canary, HalfPrecision, Handover
from ttrl.server.connection import JoinedServer
from ttrl.server.model_folder import weights_digest
from ttrl.weights import sync
from ttrl.weights.canary import check_canary
from ttrl.weights.sync import sync_weights
from ttrl.weights.verify import verify_weights


@pytest.mark.parametrize("mode", ["reload", "restart"])
def test_sync(fake_server, checkpoints, mode):
    old, new = checkpoints
    with fake_server() as server:
        pid = server._child.pid
        assert verify_weights(server, old, compare=False).canary_max_difference < 1e-9
        report = sync_weights(server, new, mode=mode)
        assert (report.mode, report.fell_back) == (
            mode,
            None,
        ) and report.proof.canary_max_difference < 1e-9
        # Over both workers.
        assert (report.proof.compared, report.proof.unchecked) == (4, 2)
        assert (server._child.pid == pid) == (mode == "reload")
        assert server.model_folder == new  # what a later restart loads
        assert not check_canary(server, Canary.load(old)).passed


def held_out(checkpoint, weight=None):
    """What a trainer says of the weights of a checkpoint, in "memory"."""
    memory = checkpoint / "memory"
    memory.write_text((checkpoint / "weight").read_text() if weight is None else weight)
    canary = Canary.load(checkpoint)
    return Handover(str(memory), [("w", [0], [1], canary.weights["w"])], canary)


def test_from_memory(fake_server, checkpoints):
    with fake_server() as server:
        report = sync_weights(server, checkpoints[1], handover=held_out(checkpoints[1]))
        assert (report.mode, report.fell_back) == (
            "memory",
            None,
        ) and report.proof.canary_max_difference < 1e-9
        assert report.proof.compared == 4
        assert server.request("GET", "/calls") == ["ttrl_load_weights memory"]
        assert server.model_folder == checkpoints[1]  # what a later restart loads


@pytest.mark.parametrize(
    "behaviour, reason",
    [
        ("ignore-memory", "the server's weights differ"),
        (
            "refuse-memory",
            "ServerError: POST /collective_rpc: the server answered 500: .*shape mismatch",
        ),
        ("gone", "no such memory"),
        # The canary sees nothing.
        ("changed", "^1 tensors in memory differ from the trainer's, such as w$"),
    ],
)
def test_where_memory_fails_files_are_read(fake_server, checkpoints, behaviour, reason):
    handover = held_out(checkpoints[1], "0.7500001" if behaviour == "changed" else None)
    if behaviour == "gone":
        handover = dataclasses.replace(handover, memory="/nowhere")
    with fake_server(behaviour) as server:
        report = sync_weights(server, checkpoints[1], handover=handover)
        assert (report.mode, report.fell_back) == ("reload", None)
        assert re.search(reason, report.files_because), report.files_because


def test_files_that_come_later(fake_server, checkpoints, tmp_path):
    """What is handed over is proven before there are files; what has to be read waits for them, as
    long as there is a trainer.
    """
    handover, later = held_out(checkpoints[1]), tmp_path / "later"
    with fake_server() as server:
        assert sync_weights(server, later, handover=handover).mode == "memory"
        with pytest.raises(ServerError, match=r"the trainer ended before it wrote .*/later"):
            sync_weights(server, later, handover=dataclasses.replace(handover, memory="/nowhere"))
        writing = threading.Timer(0.5, lambda: checkpoints[1].rename(later))
        handover = dataclasses.replace(
            handover, memory=str(shutil.copy(handover.memory, tmp_path / "memory"))
        )
        wrong = dataclasses.replace(handover, parts=[("w", [0], [1], "another")])
        writing.start()
        report = sync_weights(server, later, handover=wrong)
        writing.join()
        assert report.mode == "reload" and "such as w" in report.files_because


def test_servers_that_read_files_alone(fake_server, checkpoints):
    handover = held_out(checkpoints[1])
    with fake_server(extra_args={"worker_extension_cls": None}) as server:
        assert sync_weights(server, checkpoints[1], handover=handover).mode == "reload"
    with fake_server() as there:
        assert sync_weights(joined(there), checkpoints[1], handover=handover).mode == "reload"


def joined(there, **settings):
    """The same server as one that somebody else started."""
    return JoinedServer(
        there.root_url, served_model_name="m", dtype="float32", api_key=there.api_key, **settings
    )


def test_one_that_was_started_with_the_checkpoint_is_only_verified(fake_server, checkpoints):
    old, new = checkpoints
    link = old.parent / "link"
    link.mkdir()
    for path in old.iterdir():
        (link / path.name).symlink_to(path)
    handover = held_out(old)
    with fake_server() as server:
        report = sync_weights(server, link, mode="start", handover=handover)
        assert (report.mode, report.proof.compared) == ("start", 4)
        assert server.request("GET", "/calls") == [] and server.policy_folder == link
        # Other files; in half precision, the canary alone would not tell.
        assert sync_weights(server, new, mode="start").mode == "reload"


def test_one_that_did_not_come_out_well_at_its_start_is_given_the_weights_again(
    fake_server, checkpoints, caplog
):
    old = checkpoints[0]
    (old / "weight").write_text("0.6")
    with fake_server() as server:
        (old / "weight").write_text("0.5")
        assert sync_weights(server, old, mode="start").mode == "reload"
    assert "did not load its weights correctly" in caplog.text


def mend_at_its_start(server):
    """Let it behave once it is started again."""
    start = server.start

    def mended():
        server.behaviour = "fine"
        return start()

    server.start = mended


@pytest.mark.long(
    but=["refuse-ServerError: POST /collective_rpc: the server answered 500: .*shape mismatch"]
)
@pytest.mark.parametrize(
    "behaviour, reason",
    [
        (
            "ignore-reload",
            r"the server's weights differ: w: 1 elements are not those of the files$",
        ),
        ("differs", r"the server's weights differ"),  # the canary sees nothing
        (
            "blind",  # nor does the comparison
            r"largest .* 0\.275 > 0\.001 \(float32\).*prompt position 1 \(token 4\): server "
            r"-4\.550000, trainer -4\.825",
        ),
        # The prompt's logprobs are right.
        ("keep-cache", r"greedy token 0 \(1000\): server -1\.800000, trainer -1\.825000"),
        ("refuse", "ServerError: POST /collective_rpc: the server answered 500: .*shape mismatch"),
    ],
)
def test_a_failed_reload_falls_back_to_a_restart(fake_server, checkpoints, behaviour, reason):
    """Long for the other failures: only these are noticed by the comparison or the canary."""
    with fake_server(behaviour) as server:
        mend_at_its_start(server)
        report = sync_weights(server, checkpoints[1])
        assert report.mode == "restart" and report.proof.canary_max_difference < 1e-9
        assert re.search(reason, report.fell_back), report.fell_back


def test_an_old_prefix_cache_is_seen_where_half_precision_hides_it(fake_server, checkpoints):
    with fake_server("keep-cache") as server:
        server.dtype = "bfloat16"
        mend_at_its_start(server)
        assert (
            "tokens came from the emptied prefix cache"
            in sync_weights(server, checkpoints[1]).fell_back
        )


def test_a_mismatch_after_the_restart_stops_with_both_numbers(fake_server, checkpoints):
    new = checkpoints[1]
    (new / "weight").write_text("0.76")  # the weights are not those that the trainer computed with
    canary = json.loads((new / "canary.json").read_text())
    # And it did not note their digests.
    (new / "canary.json").write_text(json.dumps(canary | {"weights": {}}))
    with fake_server() as server:
        for mode in ("reload", "restart"):
            with pytest.raises(
                WeightSyncError,
                match=r"after a restart.*/new: .* server -\d\.836000, trainer -\d\.825000",
            ):
                sync_weights(server, new, mode=mode)
    with fake_server() as server, pytest.raises(WeightSyncError, match="after its start"):
        verify_weights(server, new, compare=False)


@pytest.mark.long(but=["reload"])
@pytest.mark.parametrize("mode", ["reload", "restart"])
def test_a_file_that_changed_since_the_trainer_wrote_it(fake_server, checkpoints, mode):
    """By so little that the canary passes, and the server holds what is in the file.

    Long for restarts: only these read the file at a start.
    """
    new = checkpoints[1]
    (new / "weight").write_text("0.750001")
    with (
        fake_server() as server,
        pytest.raises(WeightSyncError, match=r"after a restart.* 1 tensors .* such as w"),
    ):
        sync_weights(server, new, mode=mode)
    with fake_server() as server:
        server.restart(new)
        with pytest.raises(WeightSyncError, match=r"after its start.*damaged or replaced"):
            verify_weights(server, new)
        assert sync_weights(server, new, compare=False).mode == "reload"


def test_tensors_that_the_trainer_did_not_write(fake_server, checkpoints):
    canary = json.loads((checkpoints[1] / "canary.json").read_text())
    (checkpoints[1] / "canary.json").write_text(json.dumps(canary | {"weights": {"v": "0"}}))
    with (
        fake_server() as server,
        pytest.raises(WeightSyncError, match="1 tensors in the files are unknown to the trainer"),
    ):
        sync_weights(server, checkpoints[1])


def test_without_our_worker_extension_the_canary_alone_decides(fake_server, checkpoints):
    with fake_server(extra_args={"worker_extension_cls": None}) as server:
        report = sync_weights(server, checkpoints[1])
        assert (report.mode, report.proof.compared) == ("reload", 0)
        assert server.request("GET", "/calls") == ["reload_weights"]


def test_where_weights_cannot_be_compared_the_canary_decides_and_it_is_said(
    fake_server, checkpoints, caplog
):
    with fake_server("cannot-compare") as server:
        assert sync_weights(server, checkpoints[1]).proof.compared == 0
    assert "only the canary checks them: KeyError: 'w'" in caplog.text


def test_requests_that_name_weights_are_refused_from_the_sync_on_until_it_was_opened(
    fake_server, checkpoints
):
    with fake_server() as server:
        server.open_to("v1")
        assert server.open_version() == "v1"
        assert server.request("GET", "/v1/models", headers={"X-TTRL-Weights": "v1"})["data"]
        sync_weights(server, checkpoints[1])
        assert server.open_version() is None
        with pytest.raises(ServerError, match=r"503.*other weights"):
            server.request("GET", "/v1/models", headers={"X-TTRL-Weights": "v1"})
        server.open_to("v2")
        server.restart()
        assert server.open_version() is None and server.version is None


def test_sleep_and_wake(fake_server, checkpoints):
    """The weights are gone: they are loaded between the two halves of waking."""
    with fake_server() as server:
        sync.sleep(server)
        assert sync_weights(server, checkpoints[0], asleep=True).mode == "reload"
        calls = [
            "/sleep?level=2",
            "/wake_up?tags=weights",
            "ttrl_load_weights",
            "/wake_up?tags=kv_cache",
        ]
        assert server.request("GET", "/calls") == calls


def test_weights_from_memory_for_one_that_sleeps(fake_server, checkpoints):
    """Files serve a server whose weights alone are awake, as the memory is gone."""
    handover = held_out(checkpoints[1])
    with fake_server() as server:
        sync.sleep(server)
        before = len(server.request("GET", "/calls"))
        report = sync_weights(server, checkpoints[1], asleep=True, handover=handover)
        assert report.mode == "memory"
        assert server.request("GET", "/calls")[before:] == [
            "/wake_up?tags=weights",
            "ttrl_load_weights memory",
            "/wake_up?tags=kv_cache",
        ]
        sync.sleep(server)
        before = len(server.request("GET", "/calls"))
        gone = dataclasses.replace(handover, memory="/nowhere")
        report = sync_weights(server, checkpoints[1], asleep=True, handover=gone)
        assert report.mode == "reload" and "no such memory" in report.files_because
        assert server.request("GET", "/calls")[before:] == [
            "/wake_up?tags=weights",
            "ttrl_load_weights memory",
            "/wake_up?tags=weights",
            "ttrl_load_weights",
            "/wake_up?tags=kv_cache",
        ]


def test_adapters_beside_the_base(fake_server, checkpoints):
    base, tuned = checkpoints
    (tuned / "adapter").mkdir()
    with fake_server(served_model_name="policy", serves_adapters=True) as server:
        assert server.model_name == "policy"
        assert sync_weights(server, base).mode == "reload"  # nothing to load: it has it
        for mode, said in (("reload", "adapter"), ("restart", "restart")):
            report = sync_weights(server, tuned, mode=mode)
            assert (report.mode, report.proof.compared) == (
                said,
                0,
            ) and report.proof.canary_max_difference < 1e-9
            assert server.model_name == "policy-adapter" and server.model_folder == base
        assert (
            server.weights_digest() == f"{weights_digest(tuned)}/float32"
            and server.policy_folder == tuned
        )
        before = len(server.request("GET", "/calls"))
        sync.sleep(server)  # a base that were gone would not come again
        assert sync_weights(server, tuned, asleep=True).mode == "adapter"
        calls = server.request("GET", "/calls")[before:]
        assert calls == ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


def test_a_server_of_somebody_else_is_not_restarted(fake_server, checkpoints):
    with fake_server("ignore-reload") as there:
        server = JoinedServer(
            there.root_url + "/v1/", served_model_name="m", dtype="float32", api_key=there.api_key
        )
        assert server.base_url == there.base_url
        with pytest.raises(WeightSyncError, match=r"this process cannot restart it.*ttrl serve"):
            sync_weights(server, checkpoints[1])
        there.stop()
        with pytest.raises(ServerDiedError, match="cannot be reached"):
            sync_weights(server, checkpoints[1])


def test_weights_that_were_brought_nearer_are_held_to_the_trainers_digests(
    fake_server, checkpoints, tmp_path
):
    near = shutil.copytree(checkpoints[1], tmp_path / "near")
    (checkpoints[1] / "weight").unlink()  # nobody needs it
    places = [near]
    with fake_server() as there:
        server = joined(there, bring=lambda server, checkpoint: contextlib.nullcontext(places))
        assert sync_weights(server, checkpoints[1]).proof.compared == 4
        (near / "weight").write_text((checkpoints[0] / "weight").read_text())
        with pytest.raises(WeightSyncError, match="differ from the trainer's"):
            sync_weights(server, checkpoints[1])


@pytest.mark.parametrize("weight", [None, "0.75000001"])
def test_where_what_was_brought_fails_the_checkpoint_itself_is_read(
    fake_server, checkpoints, tmp_path, weight
):
    """It is gone or damaged; and it is let go at the end."""
    near, given_back = tmp_path / "near", []

    @contextlib.contextmanager
    def bring(server, checkpoint):
        if weight is not None:
            near.mkdir()
            (near / "weight").write_text(weight)
        yield [near, checkpoint]
        given_back.append(near)

    with fake_server() as there:
        report = sync_weights(joined(there, bring=bring), checkpoints[1])
    assert report.mode == "reload" and report.fell_back is None and given_back == [near]
    reason = "no such memory" if weight is None else "differ from the trainer's"
    assert reason in report.files_because


def test_nan_is_a_mismatch(fake_server, checkpoints):
    with fake_server("nan") as server:
        report = check_canary(server, Canary.load(checkpoints[0]))
        assert (
            not report.passed
            and report.max_difference == math.inf
            and "server nan" in report.problem
        )


def test_another_greedy_token_is_allowed_only_at_a_tie(fake_server, checkpoints):
    canary = Canary.load(checkpoints[0])
    with fake_server("other-token") as server:
        report = check_canary(server, canary)
        assert (
            not report.passed
            and "greedy token 7" in report.problem
            and "server 5" in report.problem
        )
        assert check_canary(
            server, dataclasses.replace(canary, greedy_margins=[1.0] * 7 + [5e-4])
        ).passed
        assert not check_canary(
            server, dataclasses.replace(canary, greedy_margins=[5e-4] * 7 + [1.0])
        ).passed


def moved_away(folder):
    """Let the trainer of `folder` have computed something else with the same weights."""
    path = folder / "canary.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            content | {"logprobs": [None, *(value - 0.5 for value in content["logprobs"][1:])]}
        )
    )


@pytest.mark.long(but=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_all_weights_proven_other_logprobs_are_a_warning(
    fake_server, checkpoints, dtype, caplog
):
    """Long for float32: only that has narrower limits."""
    moved_away(checkpoints[0])
    moved_away(checkpoints[1])
    with fake_server("proven", dtype=dtype) as server:
        # Not after a reload: perhaps only a copy of the weights is right.
        report = sync_weights(server, checkpoints[1])
        assert (
            report.mode == "restart"
            and "of the canary 0." in report.fell_back
            and report.proof.is_whole
        )
        assert report.proof.canary_max_difference == pytest.approx(0.5)
        assert "has the trainer's weights, bit for bit, but computes different" in caplog.text
        caplog.clear()
        # Now that is known of this server.
        assert sync_weights(server, checkpoints[0]).mode == "reload"
        assert "|logprob difference| of the canary" in caplog.text
    with fake_server("proven", dtype=dtype) as server:
        assert verify_weights(server, checkpoints[0]).canary_max_difference == pytest.approx(0.5)
        assert sync_weights(server, checkpoints[1]).mode == "reload"
        for way in ("reload", "restart"):  # the canary alone
            with pytest.raises(
                WeightSyncError, match=r"after a restart.* \|logprob difference\| of the canary"
            ):
                sync_weights(server, checkpoints[1], mode=way, compare=False)


def test_but_not_where_anything_else_may_be_wrong(fake_server, checkpoints):
    moved_away(checkpoints[0])
    # Not all weights were compared, or not bit for bit.
    for behaviour in ("fine", "proven-roughly"):
        with (
            fake_server(behaviour) as server,
            pytest.raises(WeightSyncError, match="after its start"),
        ):
            verify_weights(server, checkpoints[0])
    with fake_server("proven nan") as server, pytest.raises(WeightSyncError, match="server nan"):
        verify_weights(server, checkpoints[0])
    moved_away(checkpoints[1])
    with fake_server("proven keep-cache") as server:
        verify_weights(server, checkpoints[0])  # so it is known to be apart
        assert "logprob difference" in sync_weights(server, checkpoints[1]).fell_back


def test_nothing_is_proven_without_the_trainers_record_of_the_weights(fake_server, checkpoints):
    """The server may have other files than the trainer had, on this machine, too: files can change
    on the way.
    """
    moved_away(checkpoints[1])
    with fake_server("proven") as there:
        server = joined(there)
        assert sync_weights(server, checkpoints[1]).proof.canary_max_difference == pytest.approx(
            0.5
        )
        content = json.loads((checkpoints[1] / "canary.json").read_text())
        (checkpoints[1] / "canary.json").write_text(json.dumps(content | {"weights": {}}))
        with pytest.raises(WeightSyncError, match="this process cannot restart it"):
            sync_weights(server, checkpoints[1])
        with pytest.raises(WeightSyncError, match="after a restart"):
            sync_weights(there, checkpoints[1])


@pytest.mark.parametrize("shift, passes", [(0.0009, True), (0.0011, False), (-0.0011, False)])
def test_float32_tolerance(fake_server, checkpoints, shift, passes):
    canary = Canary.load(checkpoints[0])
    logprobs = [*canary.logprobs[:5], canary.logprobs[5] + shift, *canary.logprobs[6:]]
    with fake_server() as server:
        assert check_canary(server, dataclasses.replace(canary, logprobs=logprobs)).passed is passes
        # Either side in half precision: one position alone may be off further.
        server.dtype = "bfloat16"
        assert check_canary(server, dataclasses.replace(canary, logprobs=logprobs)).passed


MEASURED = HalfPrecision(mean=0.02, p99=0.1)


@pytest.mark.long(but=["0.009-300-measured6-True", "0.065-300-measured3-False"])
@pytest.mark.parametrize(
    "shift, positions, measured, passes",
    [
        (0.14, 300, None, True),
        (0.16, 300, None, False),
        (0.055, 300, MEASURED, True),  # three times what half precision costs on this model
        (0.065, 300, MEASURED, False),
        (0.35, 5, MEASURED, True),  # four times at the 99th percentile: a few positions
        (0.45, 5, MEASURED, False),
        # Other kernels round where the trainer's do not.
        (0.009, 300, HalfPrecision(0.0, 0.0), True),
        (0.011, 300, HalfPrecision(0.0, 0.0), False),
    ],
)
def test_limits_in_half_precision_follow_from_what_it_costs(
    fake_server, checkpoints, shift, positions, measured, passes
):
    """Long for the other measurements: each only lies on its side of a limit."""
    canary = Canary.load(checkpoints[0])
    moved = [
        value + shift if number < positions else value
        for number, value in enumerate(canary.logprobs[1:])
    ]
    greedy = [value - shift if positions == 300 else value for value in canary.greedy_logprobs]
    changes = {
        "dtype": "bfloat16",
        "logprobs": [None, *moved],
        "greedy_logprobs": greedy,
        "half_precision": measured,
    }
    with fake_server() as server:
        assert check_canary(server, dataclasses.replace(canary, **changes)).passed is passes


@pytest.mark.parametrize(
    "measured", [{"mean": -1, "p99": 0}, {"mean": 0.1}, {"mean": 0.1, "p99": math.inf}, "much"]
)
def test_a_measure_that_makes_no_sense_is_refused(checkpoints, tmp_path, measured):
    content = json.loads((checkpoints[0] / "canary.json").read_text())
    (tmp_path / "canary.json").write_text(json.dumps(content | {"half_precision": measured}))
    with pytest.raises(ModelFolderError, match="is damaged"):
        Canary.load(tmp_path)


def test_a_server_that_stays_busy(fake_server):
    with fake_server() as server, pytest.raises(ServerError, match="check for running requests"):
        sync.reset_prefix_cache(server, drain_seconds=0.0)


def test_a_restart_that_fails(fake_server, checkpoints):
    with fake_server() as server:
        server.behaviour = "die"
        with pytest.raises(ServerStartError, match="root of it all"):
            sync_weights(server, checkpoints[1], mode="restart")


@pytest.mark.parametrize(
    "change, message",
    [
        (None, "does not exist"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ({"schema": 2}, "schema 2, but this version reads 1"),
        ({"logprobs": [None, -1.0]}, "37 token ids and 2 logprobs"),
        ({"logprobs": [None] * 37}, "not a finite number"),
        ({"weights": ["x"]}, "is damaged"),
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
    with pytest.raises(
        ModelFolderError, match=rf"canary\.json.*{message}.*without it, ttrl cannot check"
    ):
        Canary.load(checkpoints[0])


def test_a_supervised_run_trusts_a_server_started_with_its_model(fake_server, checkpoints):
    """Nothing proves a model that no trainer of ours has written; checkpoints are proven."""
    old, new = checkpoints
    (old / "canary.json").unlink()
    with fake_server() as server:
        pid = server._child.pid
        started = supervised_run._sync(server, old, mode="start")
        assert (started.mode, started.proof, server._child.pid) == ("start", None, pid)
        assert server.policy_folder == old.absolute()
        trained = supervised_run._sync(server, new)
        assert (trained.mode, server.model_folder) == ("reload", new)
        assert trained.proof.canary_max_difference < 1e-9
        back = supervised_run._sync(server, old)
        assert (back.proof, server.policy_folder) == (None, old.absolute())
        assert server._child.pid != pid

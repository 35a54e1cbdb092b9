"""A model with tied embeddings, synced in place into a real vLLM server: never a wrong policy,
whatever goes wrong on the way.

Only a real vLLM has weights of its own to compare.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

import openai
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.fake_vllm import KeepsItsCache
from support.handing_over import HandingOver

from ttrl import TrainConfig
from ttrl.configs import TrainingConfig
from ttrl.errors import ServerError, WeightSyncError
from ttrl.facts import dumped
from ttrl.records import Canary, Handover
from ttrl.server.connection import JoinedServer
from ttrl.server.vllm import VLLMServer
from ttrl.system.console import Console
from ttrl.tiny_model import make_tiny_model
from ttrl.training.checkpoints import hand_over
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.weight_memory import WeightMemory
from ttrl.training.policy.loading import load_policy
from ttrl.training.trainer_canary import compute_canary
from ttrl.weights import sync
from ttrl.weights.canary import check_canary
from ttrl.weights.policy_server import PolicyServer
from ttrl.weights.source import Files
from ttrl.weights.sync import sync_weights
from ttrl.weights.verify import compare_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HERE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tiny_server):
    return tiny_server.log_path.parent


@pytest.fixture(scope="module")
def checkpoints(folder):
    """Two models with tied embeddings and no lm_head.weight in their files."""
    made = []
    for seed in (1, 2):
        checkpoint = make_tiny_model(
            folder / f"{seed:04}" / "checkpoint", seed=seed, layers=2, width=64, heads=2, tied=True
        )
        policy = load_policy(
            TrainingConfig(model=str(checkpoint), output_dir="", dtype="fp32", device="cpu"), HERE
        )
        (checkpoint / "canary.json").write_text(
            dumped(compute_canary(policy, HERE.device, checkpoint))
        )
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        made.append(checkpoint)
    return made


@pytest.fixture(scope="module")
def started(tiny_server, folder):
    yield tiny_server
    (folder / "fault.json").unlink(missing_ok=True)
    sync.load_weights(tiny_server, Files(Path(tiny_server.model_folder), None))
    sync.reset_prefix_cache(tiny_server)


@pytest.fixture
def server(started, checkpoints, folder):
    """As one that is never started anew, with the first checkpoint; so a fault ends in an error and
    not in a restart.
    """
    (folder / "fault.json").unlink(missing_ok=True)
    joined = JoinedServer(
        started.root_url, served_model_name="policy", dtype="float32", api_key=started.api_key
    )
    assert sync_weights(joined, checkpoints[0]).fell_back is None
    joined.open_to("first")
    return joined


class OnThisMachine(JoinedServer):
    """Never started anew, and takes weights from memory."""

    takes_memory = True


@pytest.fixture
def near(server, started):
    return OnThisMachine(
        server.root_url, served_model_name="policy", dtype="float32", api_key=started.api_key
    )


def handover_of(said, checkpoint):
    return Handover(**said, canary=Canary.load(checkpoint))


@pytest.fixture(scope="module")
def handed_over(checkpoints):
    """What a trainer says of each checkpoint, whose memory it holds."""
    memories = [WeightMemory(HERE), WeightMemory(HERE)]

    def hold_out(number):
        policy = load_policy(
            TrainingConfig(
                model=str(checkpoints[number]), output_dir="", dtype="fp32", device="cpu"
            ),
            HERE,
        )
        parts = hand_over(memories[number], policy, checkpoints[number], "fp32")
        return Handover(memories[number].path, parts, Canary.load(checkpoints[number]))

    yield hold_out
    for memory in memories:
        memory.close()


def test_from_memory_and_every_weight_compared(near, checkpoints, handed_over, folder):
    for number in (1, 0, 1):
        handover = handed_over(number)
        report = sync_weights(near, checkpoints[number], handover=handover)
        assert (report.mode, report.fell_back) == (
            "memory",
            None,
        ) and report.proof.canary_max_difference < 1e-4
        assert report.proof.unchecked == 0 and report.proof.exact
    with safe_open(checkpoints[1] / "model.safetensors", "pt") as file:
        total = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert total <= report.proof.compared <= total + 63 * 64
    # The trainer writes the next ones there, while the server serves these.
    with open(handover.memory, "r+b") as memory:
        memory.seek(8 + int.from_bytes(memory.read(8), "little"))
        memory.write(bytes(os.path.getsize(handover.memory) - memory.tell()))
    # As the files say.
    assert compare_weights(near, Files.of(checkpoints[1])).problem is None
    assert check_canary(near, Canary.load(checkpoints[1])).passed


@pytest.mark.parametrize(
    "fault, why",
    [
        (
            {"tensor": "model.layers.0.self_attn.k_proj.weight", "index": [0, 0], "add": 1e-5},
            ": 1 elements are not those of",
        ),
        (
            {"tensor": "model.embed_tokens.weight", "index": None, "add": 1e-4},
            ": 1 elements are not those of",
        ),
        ({"swap": ["model.layers.0.", "model.layers.1."]}, "elements are not those of"),
        ({"old": True}, "elements are not those of"),
    ],
)
def test_what_goes_wrong_on_the_way_from_memory_is_caught(
    near, checkpoints, handed_over, folder, fault, why, caplog
):
    if fault.get("tensor") and fault["index"] is None:
        fault = fault | {"index": [unused_token(checkpoints[1]), 0]}
    (folder / "fault.json").write_text(json.dumps(fault))
    with pytest.raises(WeightSyncError):  # the same happens to what is read from files
        sync_weights(near, checkpoints[1], handover=handed_over(1))
    assert why in "".join(caplog.messages)
    assert_closed(near)
    (folder / "fault.json").unlink()
    assert sync_weights(near, checkpoints[1]).mode == "reload"
    assert sync_weights(near, checkpoints[0], handover=handed_over(0)).mode == "memory"


def test_a_load_that_breaks_off_leaves_a_server_that_files_can_be_loaded_into(
    near, checkpoints, handed_over, folder
):
    (folder / "fault.json").write_text('{"break": true}')
    report = sync_weights(near, checkpoints[1], handover=handed_over(1))
    assert report.mode == "reload" and "the server answered 500" in report.files_because
    (folder / "fault.json").unlink()
    assert sync_weights(near, checkpoints[0], handover=handed_over(0)).mode == "memory"


def test_memory_that_changed_after_the_trainer_hashed_it_is_caught(near, checkpoints, handed_over):
    """The server holds what lies there, and the canary does not see it."""
    handover = handed_over(1)
    with open(handover.memory, "r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
        file.seek(
            begin
            + header["model.embed_tokens.weight"]["data_offsets"][0]
            + unused_token(checkpoints[1]) * 64 * 4
        )
        file.write(b"\0\0\0\0")
    report = sync_weights(near, checkpoints[1], handover=handover)
    assert report.mode == "reload"
    assert (
        report.fell_back is None
        and report.files_because
        == "1 tensors in memory differ from the trainer's, such as model.embed_tokens.weight"
    )


def test_weights_that_were_brought_to_the_servers_machine(
    server, started, checkpoints, tmp_path, caplog
):
    """To its memory, in as many files as somebody likes."""
    near: list[Path] = []
    replica = JoinedServer(
        server.root_url,
        served_model_name="policy",
        dtype="float32",
        api_key=started.api_key,
        bring=lambda server, checkpoint: contextlib.nullcontext(near),
    )
    for number in (1, 0):
        brought = tmp_path / str(number)
        weights, halves = load_file(checkpoints[number] / "model.safetensors"), ({}, {})
        for place, (name, tensor) in enumerate(weights.items()):
            halves[place % 2][name] = tensor
        brought.mkdir()
        for place, half in enumerate(halves):
            save_file(half, brought / f"model-{place}.safetensors", metadata={"format": "pt"})
        near[:] = [brought]
        report = sync_weights(replica, checkpoints[number])
        assert report.fell_back is None and report.files_because is None
        assert report.proof.unchecked == 0 and report.proof.exact
        assert report.proof.compared >= sum(tensor.numel() for tensor in weights.values())
        # As the files say.
        assert compare_weights(server, Files.of(checkpoints[number])).problem is None
    with pytest.raises(WeightSyncError, match="does not compute with the weights in"):
        sync_weights(replica, checkpoints[1])  # those of the other one were brought
    for wrong in (brought, tmp_path / "gone"):
        near[:] = [wrong, checkpoints[1]]
        report = sync_weights(replica, checkpoints[1])  # reads the files
        assert report.fell_back is None and report.files_because and report.proof.compared


def test_memory_that_cannot_be_mapped(near, checkpoints, handed_over):
    report = sync_weights(
        near,
        checkpoints[1],
        handover=dataclasses.replace(handed_over(1), memory="/proc/self/fd/999"),
    )
    assert report.mode == "reload" and "No such file" in report.files_because


@pytest.mark.long
def test_from_the_ranks_of_a_trainer_to_those_of_a_server(started, checkpoints, folder):
    """Two ranks that hold half of each tensor's rows, and a server of two workers, which divide
    heads, columns and rows among them; whole, no tensor is anywhere but in the memory that all of
    them map.

    Long: only this has a server of several workers. Ranks that write their parts:
    tests/training/test_weight_memory.py; one worker: above.
    """
    # Of the second worker's columns.
    damaged = {"tensor": "model.layers.1.mlp.down_proj.weight", "index": [3, 40], "add": 1e-5}
    with (
        VLLMServer(
            checkpoints[0],
            served_model_name="policy",
            log_path=folder / "two.log",
            dtype="float32",
            extra_args=started.extra_args | {"tensor_parallel_size": 2},
            env=started.env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        ) as there,
        HandingOver(checkpoints[0], 2) as trainer,
    ):
        (folder / "fault.json").unlink(missing_ok=True)
        server = OnThisMachine(
            there.root_url, served_model_name="policy", dtype="float32", api_key=there.api_key
        )
        for number in (1, 0, 1):
            handover = handover_of(trainer.hold_out(checkpoints[number]), checkpoints[number])
            report = sync_weights(server, checkpoints[number], handover=handover)
            assert report.mode == "memory" and report.proof.canary_max_difference < 1e-4
            assert report.proof.is_whole
        assert len(handover.parts) > len({name for name, *_ in handover.parts})
        (folder / "fault.json").write_text(json.dumps(damaged))
        with pytest.raises(
            WeightSyncError, match=r"down_proj\.weight: 1 elements are not those of the files"
        ):
            sync_weights(
                server,
                checkpoints[0],
                handover=handover_of(trainer.hold_out(checkpoints[0]), checkpoints[0]),
            )
        assert_closed(server)
        (folder / "fault.json").unlink()
        name, starts, lengths, sha = handover.parts[-1]
        wrong = dataclasses.replace(
            handover, parts=[*handover.parts[:-1], (name, starts, lengths, sha[::-1])]
        )
        trainer.hold_out(checkpoints[1])
        report = sync_weights(server, checkpoints[1], handover=wrong)
        assert report.mode == "reload" and name in report.files_because


def test_in_place_and_every_weight_compared(server, checkpoints):
    for checkpoint in (checkpoints[1], checkpoints[0], checkpoints[1]):
        report = sync_weights(server, checkpoint)
        assert (report.mode, report.fell_back) == (
            "reload",
            None,
        ) and report.proof.canary_max_difference < 1e-4
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            total = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        # vLLM pads the vocabulary to a multiple of 64 and fills the rest with zeros
        assert total <= report.proof.compared <= total + 63 * 64
        assert report.proof.unchecked == 0 and report.proof.exact


def unused_token(checkpoint):
    canary = Canary.load(checkpoint)
    return next(
        token for token in range(300) if token not in {*canary.token_ids, *canary.greedy_token_ids}
    )


@pytest.mark.parametrize(
    "tensor, index, add",
    [
        ("model.embed_tokens.weight", None, 1e-4),
        ("model.layers.1.mlp.down_proj.weight", [3, 5], 1e-5),
        ("model.layers.0.self_attn.k_proj.weight", [0, 0], 1e-5),
        ("model.norm.weight", [7], 1e-5),
    ],
)
def test_one_weight_that_changed_on_the_way_is_caught(
    server, checkpoints, folder, tensor, index, add
):
    """Also where the canary, rightly, does not see it."""
    index = index or [unused_token(checkpoints[1]), 0]
    (folder / "fault.json").write_text(json.dumps({"tensor": tensor, "index": index, "add": add}))
    with pytest.raises(
        WeightSyncError,
        match=r"the server's weights differ: \S+: 1 elements are not those of the files",
    ):
        sync_weights(server, checkpoints[1])
    assert_closed(server)
    assert check_canary(server, Canary.load(checkpoints[1])).passed


def assert_closed(server):
    """No rollout could be sampled: requests for the weights of before and after are refused."""
    assert server.open_version() is None
    for version in ("first", "second"):
        with pytest.raises(ServerError, match=r"503: .*this server has other weights"):
            completion = {"model": "policy", "prompt": "a", "max_tokens": 1}
            server.request(
                "POST", "/v1/completions", completion, headers={"X-TTRL-Weights": version}
            )


def test_old_weights_left_in_place_are_caught(server, checkpoints, folder):
    (folder / "fault.json").write_text(json.dumps({"old": True}))
    with pytest.raises(WeightSyncError, match="the server's weights differ"):
        sync_weights(server, checkpoints[1])
    assert_closed(server)
    with pytest.raises(
        WeightSyncError,
        match=r"largest \|logprob difference\|.*server -\d+\.\d+, trainer -\d+\.\d+",
    ):
        sync_weights(server, checkpoints[1], compare=False)  # the canary alone
    assert_closed(server)


def test_an_old_prefix_cache_is_caught(server, started, checkpoints):
    forgetful = KeepsItsCache(
        server.root_url, served_model_name="policy", dtype="float32", api_key=started.api_key
    )
    with pytest.raises(WeightSyncError, match="greedy token"):
        sync_weights(forgetful, checkpoints[1])
    assert_closed(server)
    assert sync_weights(server, checkpoints[1]).proof.canary_max_difference < 1e-4


def test_vllms_own_reload_leaves_the_packed_copy_of_a_tied_head(server, checkpoints):
    """The reason for a worker extension. Should this fail with a later vLLM, `ttrl_load_weights`
    may have become needless.
    """
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoints[1])}}
    server.request("POST", "/collective_rpc", body)
    sync.reset_prefix_cache(server)
    canary = Canary.load(checkpoints[1])
    assert "lm_head.weight" in (compare_weights(server, Files.of(checkpoints[1])).problem or "")
    assert not check_canary(server, canary).passed


def test_a_joined_server_that_was_given_other_weights_comes_back_with_the_right_ones(
    started, server, checkpoints, folder, monkeypatch
):
    monkeypatch.setenv("TTRL_SERVER_KEY", started.api_key)
    config = TrainConfig(
        run=str(folder),
        model=str(checkpoints[0]),
        iterations=1,
        dtype="fp32",
        servers=0,
        joined_servers=[started.root_url],
    )
    policy_server = PolicyServer(
        config, folder / "logs", Console(quiet=True), look_at_others_seconds=1.0
    )

    async def ask(options):
        [endpoint] = policy_server.endpoints()
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            default_headers=endpoint.headers,
            **options,
        ) as client:
            return await client.completions.create(model="policy", prompt="a", max_tokens=1)

    try:
        assert policy_server.serve(checkpoints[1]).mode == "reload"
        assert policy_server.serve(checkpoints[1]) is None
        asyncio.run(ask({}))
        with policy_server._members[0].lock:  # its keeper sees it only afterwards
            sync.load_weights(server, Files.of(checkpoints[0]))
            server.close_to_all()
            with pytest.raises(openai.InternalServerError, match="other weights"):
                asyncio.run(ask({"max_retries": 0}))
        deadline = time.monotonic() + 300
        while server.open_version() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        asyncio.run(ask({}))
        assert compare_weights(server, Files.of(checkpoints[1])).problem is None
    finally:
        policy_server.stop()
    assert started.is_started  # it is somebody else's

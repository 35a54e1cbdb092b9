"""A real model, SmolLM2-135M-Instruct: parity with transformers, its chats, and in bf16 sync, GRPO,
a resume, and an adapter.

What computes in bf16 is long: a CPU takes minutes for it.
Only this has weights and a tokenizer that somebody trained.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import check_parity
import pytest
import torch
from support.facts import rows_of
from support.fake_vllm import KeepsItsCache
from support.killed_run import kill_all, wait_for
from support.readme import first_task
from support.tiny_models import sample
from support.training_steps import distance, start_and_moved
from transformers import AutoTokenizer

from ttrl import TrainConfig, train
from ttrl.data.chat.templates import tokenize_chat, tokenize_completion
from ttrl.errors import ModelFolderError, WeightSyncError
from ttrl.monitoring.findings import findings
from ttrl.ready_models import ready_model
from ttrl.records import Canary
from ttrl.server.connection import JoinedServer
from ttrl.server.vllm import VLLMServer
from ttrl.system.files import read_jsonl
from ttrl.weights.canary import check_canary
from ttrl.weights.sync import sync_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400), pytest.mark.usefixtures("one_thread")]

CHAT = [
    {"role": "system", "content": "Be short."},
    {
        "role": "user",
        "content": "What is the capital of Japan, 東京 or Kyōto? 🙂\n<|im_start|> is no word.",
    },
    {"role": "assistant", "content": "Tōkyō (東京) 🗼."},
]


@pytest.fixture(scope="module")
def model():
    try:
        return ready_model("smollm2-135m")
    except ModelFolderError as error:
        if "download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


# Parity with transformers


@pytest.fixture(scope="module")
def samples(tokenizer):
    """Two short prompts that begin alike, with two answers each."""
    found = []
    for name in ("Ada", "Omar"):
        prompt = [CHAT[0], {"role": "user", "content": f"{name} is 36. JSON?"}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for number, text in enumerate(
            (f'{{"name": "{name}", "age": 36}}', f"{name} is 36 years old.")
        ):
            answer = tokenizer(text + "<|im_end|>")["input_ids"]
            found.append(sample(ids, answer, number=number, task=name))
    return found


@pytest.fixture(scope="module")
def judge(model, samples):
    return check_parity.transformers_computes(model, torch.float32, samples)


def test_parity_in_fp32(model, samples, judge):
    """One by one, and packed with what the prompts share stored once."""
    ours, packed = check_parity.ours_computes(model, torch.float32, samples, 128)
    for one, other in zip(ours.logits, judge.logits, strict=True):
        assert other.abs().max() > 10 and (one - other).abs().max() < 1e-3
    assert (torch.cat(packed.logprobs) - torch.cat(judge.logprobs)).abs().max() < 1e-3
    for found in (ours, packed):  # 1.4e-4 on a CPU without AVX-512, which adds in another order
        assert check_parity.largest_distance(found.gradient, judge.gradient) < 2e-4


@pytest.mark.long
def test_parity_in_bf16(model, samples, judge):
    """Rounding differs: fp32 is the judge, and ours may be at most a quarter further from it than
    transformers' own bf16.

    Long: only this compares our rounding in bf16 with transformers'. In fp32: above; on GPUs:
    tests/gpu.
    """
    theirs = check_parity.transformers_computes(model, torch.bfloat16, samples)
    ours, packed = check_parity.ours_computes(model, torch.bfloat16, samples, 128)

    def errors(found):
        gradient = {name: found.gradient[name].float() for name in judge.gradient}
        differences = {"logprobs": torch.cat(found.logprobs) - torch.cat(judge.logprobs)}
        if found.logits:
            differences["logits"] = torch.cat(found.logits) - torch.cat(judge.logits)
        means = {name: value.abs().mean().item() for name, value in differences.items()}
        return means | {"gradient": distance(gradient, judge.gradient)}

    limits = {name: 1.25 * value for name, value in errors(theirs).items()}
    for found in (ours, packed):
        assert all(value <= limits[name] for name, value in errors(found).items()), (
            errors(found),
            limits,
        )


# Its chats


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Zoë paid 3€ — für 2 Äpfel\n\n\tend ",
        "東京 🗼 नमस्ते مرحبا",
        '{"name": "Ada", "age": 36}',
    ],
)
def test_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == text


def test_a_chat_is_tokenized_as_transformers_does(tokenizer):
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    prompt = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, return_dict=False)
    for found in (
        tokenize_chat(tokenizer, CHAT),
        tokenize_completion(tokenizer, CHAT[:-1], CHAT[-1]["content"], ended=True),
    ):
        assert found.token_ids == whole[:-1] and tokenizer.decode(whole[-1:]) == "\n"
        answer = [
            token for token, mine in zip(found.token_ids, found.assistant_mask, strict=True) if mine
        ]
        assert found.token_ids[: len(prompt)] == prompt and found.token_ids[len(prompt) :] == answer
        assert tokenizer.decode(answer) == CHAT[-1]["content"] + "<|im_end|>" and found.splits == 0
    assert (
        tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
        and whole.count(1) == 4
    )


# A server in bf16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def checkpoints(model, folder):
    return start_and_moved(model, folder)[:2]


@pytest.fixture(scope="module")
def started(folder, checkpoints):
    here = str(Path(__file__).parents[1])
    with VLLMServer(
        checkpoints[0],
        served_model_name="policy",
        log_path=folder / "server.log",
        dtype="bfloat16",
        max_model_len=512,
        extra_args={
            "worker_extension_cls": "support.faulty_worker.FaultyWeightSync",
            "max_num_seqs": 32,
        },
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "TTRL_TEST_FAULT": str(folder / "fault.json"),
        },
    ) as server:
        yield server


@pytest.fixture
def server(started, folder):
    """As one that is never started anew, so a fault ends in an error and not in a restart."""
    (folder / "fault.json").unlink(missing_ok=True)
    return JoinedServer(
        started.root_url, served_model_name="policy", dtype="bfloat16", api_key=started.api_key
    )


@pytest.mark.long
def test_the_servers_tokens_are_its_text(started, tokenizer):
    """Long: only this reads a trained tokenizer's ids back from vLLM. Of a tiny one: test_server.py
    and test_partial.py.
    """
    request = {
        "model": "policy",
        "messages": CHAT[:-1],
        "max_tokens": 24,
        "n": 4,
        "return_token_ids": True,
        "seed": 1,
    }
    answer = started.request("POST", "/v1/chat/completions", request)
    prompt = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, return_dict=False)
    assert answer["prompt_token_ids"] == prompt
    for choice in answer["choices"]:
        assert (
            tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
            == choice["message"]["content"]
        )
        assert (choice["token_ids"][-1] == tokenizer.eos_token_id) == (
            choice["finish_reason"] == "stop"
        )


@pytest.mark.long
def test_healthy_weights_are_accepted(server, started, checkpoints):
    """Long: only this shows that limits for bf16 let trained weights pass. In fp32:
    test_sync.py.
    """
    for checkpoint in (checkpoints[1], checkpoints[0]):
        report = sync_weights(server, checkpoint)
        assert (report.mode, report.fell_back, report.proof.unchecked) == ("reload", None, 0)
        assert report.proof.canary_max_difference > 0  # or bf16 would not have been compared
    # A line for each tensor: fp32 becomes bf16.
    assert "Attempted to load weight" not in started.log_path.read_text()


@pytest.mark.parametrize(
    "fault, shows",
    [
        ({"old": True}, True),  # first, as the server has the other checkpoint
        ({"tensor": "model.layers.7.mlp.down_proj.weight", "index": [3, 5], "add": 0.02}, False),
        ({"zero": "model.layers.15.self_attn.v_proj.weight"}, True),
        ({"swap": ["model.layers.10.", "model.layers.11."]}, True),
    ],
    ids=["old weights", "one weight", "values of a layer", "two layers"],
)
@pytest.mark.long
def test_other_weights_are_refused(server, checkpoints, folder, fault, shows):
    """By the comparison with the files; and by the canary, but for a single weight that hardly
    changes what is computed.

    Long: only this shows what a canary in bf16 notices. In fp32: test_sync.py; limits in bf16:
    tests/weights/test_sync.py.
    """
    (folder / "fault.json").write_text(json.dumps(fault))
    with pytest.raises(WeightSyncError, match="the server's weights differ"):
        sync_weights(server, checkpoints[1])
    assert server.open_version() is None
    assert check_canary(server, Canary.load(checkpoints[1])).passed is not shows


@pytest.mark.long
def test_a_prefix_cache_that_was_not_emptied_is_refused(server, started, checkpoints):
    """Whatever the numbers are: here the cache is even of the same weights.

    Long, as it needs the server of the others. In fp32: test_sync.py; where bf16 hides it:
    tests/weights/test_sync.py.
    """
    sync_weights(server, checkpoints[0])
    forgetful = KeepsItsCache(
        server.root_url, served_model_name="policy", dtype="bfloat16", api_key=started.api_key
    )
    with pytest.raises(
        WeightSyncError, match="256 of the canary's 257 tokens came from the emptied prefix cache"
    ):
        sync_weights(forgetful, checkpoints[0])
    assert server.open_version() is None


# Runs

SETTINGS = {
    **{
        "dtype": "bf16",
        "tasks_per_iteration": 3,
        "samples_per_task": 6,
        "max_tokens": 32,
        "seq_len": 512,
    },
    "training": {"lr": 1e-5, "updates_per_iteration": 1},
}
SCRIPT = textwrap.dedent(
    """
    import json, sys
    from ttrl import TrainConfig, train
    from ttrl.tasks.structured_output import get_structured_output_tasks

    train(TrainConfig(**json.loads(sys.argv[1])), get_structured_output_tasks(n=6, lenient=True))
    """
)


@pytest.mark.long
def test_grpo_killed_after_its_first_training_continues(started, server, checkpoints, folder):
    """Long: only this trains a real model, and judges its drift. Killed runs of tiny ones:
    test_run.py and test_crash.py.
    """
    run, log = folder / "run", folder / "output.log"
    settings = {**SETTINGS, "run": str(run), "model": str(checkpoints[0]), "iterations": 2}
    settings |= {"servers": 0, "joined_servers": [started.root_url]}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]

    def start():
        with open(log, "ab") as output:
            environment = {**os.environ, "TTRL_SERVER_KEY": started.api_key}
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    process = start()
    wait_for((trained := run / "iterations/0001/done/train.json").exists, process, log)
    kill_all(process)
    first = trained.read_bytes()
    assert not (run / "iterations/0002/done/rollouts.json").exists()
    assert start().wait(600) == 0, log.read_text()[-5000:]
    assert trained.read_bytes() == first

    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    cost = Canary.load(run / "iterations/0002/checkpoint").half_precision
    for row in rows[1:]:
        drift, trained = row["sampler_trainer"], row["train"]
        assert (
            row["samples"] == 18
            and 0 < row["reward"] < 1
            and {"exact", "valid"} <= row["metrics"].keys()
        )
        assert drift["tokens"] > 100 and drift["unknown"] == drift["not_finite"] == 0
        # As far as the canary's tokens, which are less likely than its own: 0.05 of cost.mean
        # 0.035, at most three times that
        assert 0 < drift["mean"] < 3 * cost.mean and drift["ess"] > 0.9
        assert (
            "unchanged" not in trained and 0 < trained["grad_norm"] < 1000 and trained["lr"] == 1e-5
        )
    assert rows[2]["sync"]["mode"] == "reload" and rows[2]["sync"]["fell_back"] is None
    said = {finding.key for finding in findings(rows_of(rows), settings)}
    assert not said & {
        "drift",
        "weights_unchanged",
        "learning_rate_zero",
        "no_gradient",
        "fell_back",
        "skipped_steps",
        "failures",
    }


@pytest.mark.long
def test_an_adapter_is_trained_and_served(checkpoints, folder):
    """On the tasks of the README: the first own task of a newcomer has a signal on this model.

    Long: only this trains an adapter of a real model. Of a tiny one: test_lora.py.
    """
    settings = {
        **SETTINGS,
        "run": str(folder / "lora"),
        "model": str(checkpoints[0]),
        "iterations": 1,
    }
    settings["training"] = {"lr": 1e-3, "updates_per_iteration": 1, "lora_rank": 8}
    settings["server"] = {"max_model_len": 512, "max_num_seqs": 32}
    tasks, held_out = ([first_task()(a, 17) for a in numbers] for numbers in ((24, 38, 55), (61,)))
    result = train(TrainConfig(**settings), tasks, held_out, quiet=True)
    assert (result.checkpoint / "adapter" / "adapter_model.safetensors").is_file()
    assert "unchanged" not in result.metrics[1]["train"] and 0 < result.metrics[1]["reward"] < 1
    marker = json.loads((folder / "lora/iterations/0001/done/validate.json").read_text())["facts"]
    assert marker["sync"]["mode"] == "adapter" and marker["sync"]["fell_back"] is None
    known = Canary.load(result.checkpoint).half_precision
    assert marker["sync"]["canary_max_difference"] > 0 and known is not None

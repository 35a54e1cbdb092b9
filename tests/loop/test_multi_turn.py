"""Tasks with a rollout through a whole run on fake parts: files, packing, resume, replay, view,
report.
"""

import json

import pytest

from ttrl import Sample, Task
from ttrl.data.packing.pack import PackedTensors
from ttrl.errors import ConfigError, StorageError, TaskError
from ttrl.replays.replay import replay
from ttrl.report.view import open_pack
from ttrl.system.files import read_jsonl


async def play(chat):
    """yes/no, then again: the reward is how often it said yes."""
    first = await chat("and then?")
    second = await chat("really?")
    return float([first.message.content, second.message.content].count("yes")), {"turns": 2.0}


def games(count=6):
    return [
        Task([{"role": "user", "content": f"game {n}"}], rollout=play, id=f"game/{n}")
        for n in range(count)
    ]


@pytest.fixture
def talking(world):
    """The fake server, but with prompts of whole conversations, and answers that differ between
    samples.
    """
    server = world.server_class
    asked = []

    def handle(self, request):
        if request.method == "GET":
            return type(self).__mro__[1].handle(self, request)
        body = json.loads(request.content)
        asked.append(body["messages"])
        # Seeds follow from sample and turn, whatever the order of requests.
        text = "yes" if body["seed"] % 3 else "no"
        ids = [*world.tokenizer.encode(text), world.tokenizer.eos_token_id]
        entries = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
        message = {"role": "assistant", "content": text}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": entries},
            "finish_reason": "stop",
            "token_ids": ids,
        }
        prompt = [
            token
            for m in body["messages"]
            for token in world.tokenizer.encode(f"<|{m['role']}|>{m['content']}<|end|>")
        ]
        # The answer's own end of turn.
        if world.tokenizer.encode("<|end|>") != [world.tokenizer.eos_token_id]:
            raise AssertionError(
                "the template of this test ends answers with another token than the model does"
            )
        prompt += world.tokenizer.encode("<|assistant|>")
        content = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        return phases_response(content | {"prompt_token_ids": prompt})

    server.handle = handle  # this world's own class
    world.asked = asked
    return world


def phases_response(content):
    try:
        import httpx2 as http
    except ImportError:
        import httpx as http
    return http.Response(200, json=content)


def test_a_run_of_conversations(talking):
    world = talking
    world.writes_reports = True
    result = world.train(games(), validation=games(2), iterations=2, sampling={"seed": 1})
    row = result.metrics[1]
    assert row["groups"]["kept"] > 0 and row["samples"] == 8 and row["metrics"] == {"turns": 2.0}
    folder = world.run / "iterations/0001"
    samples = [Sample.from_json(row) for row in read_jsonl(folder / "rollouts.jsonl")]
    assert all(len(sample.turns) == 2 and sample.turns[1].continues == 0 for sample in samples)
    packed = PackedTensors.load(folder / "packed.safetensors")
    assert (
        row["pack"]["tokenization"]["turns"]
        == 2 * row["pack"]["tokenization"]["sequences"]
        == 2 * len(packed.samples)
    )
    by_name = {(sample.task_id, sample.sample): sample for sample in samples}
    for number, one in enumerate(packed.samples):
        sample = by_name[one.task_id, one.sample]
        labels = packed.labels[(packed.sample_ids == number) & packed.assistant_mask]
        assert labels.tolist() == sample.token_ids and one.share == 1.0
        assert one.completion_length > one.num_trained == len(sample.token_ids)
    view = open_pack(world.run, 1, tokenizer=world.model)
    assert "yes" in view.text(width=120)
    report = (world.run / "report.html").read_text()
    assert "really?" in report and "2 turns" in report

    # Replayed with a grader of the whole conversation; a finished run samples nothing more.
    before = len(world.asked)
    after = replay(world.run, grader=says_no, quiet=True)
    rows = [
        Sample.from_json(row) for row in read_jsonl(after.folder / "iterations/0001/rollouts.jsonl")
    ]
    for old, new in zip(samples, rows, strict=True):
        assert (
            new.reward == sum(turn.reply["content"] == "no" for turn in old.turns)
            and new.turns == old.turns
        )
    world.train(games(), validation=games(2), iterations=2, sampling={"seed": 1})
    assert len(world.asked) == before
    with pytest.raises(
        TaskError,
        match="6 of 6 have no grader, such as 'game/0': their rollout returns the reward",
    ):
        replay(world.run, tasks=games(), quiet=True)


def says_no(choice):
    return sum(
        message["role"] == "assistant" and message["content"] == "no" for message in choice.messages
    )


def test_conversations_that_were_finished_before_a_kill_are_kept(talking):
    world = talking
    in_the_way = world.run / "iterations/0001/rollouts.jsonl"
    in_the_way.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"rollouts\.jsonl: Is a directory"):
        world.train(games(), validation=[], iterations=1, sampling={"seed": 1})
    in_the_way.rmdir()
    asked = len(world.asked)
    partial = read_jsonl(world.run / "iterations/0001/rollouts.partial.jsonl")
    assert [len(sample["turns"]) for group in partial for sample in group["samples"]] == [2] * 8
    world.train(games(), validation=[], iterations=1, sampling={"seed": 1})
    rows = read_jsonl(world.run / "iterations/0001/rollouts.jsonl")
    groups = sorted(partial, key=lambda group: group["position"])
    assert (
        rows == [sample for group in groups for sample in group["samples"]]
        and len(world.asked) == asked
    )


def test_a_token_budget_is_a_config_error(world):
    with pytest.raises(
        ConfigError,
        match=r"tokens_per_iteration is 50, but 6 of 6 tasks have a rollout \(such as 'game/0'\)",
    ):
        world.train(games(), validation=[], tokens_per_iteration=50)

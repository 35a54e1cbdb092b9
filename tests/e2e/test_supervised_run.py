"""Supervised training in pieces with held-out tasks in between: a real server is kept, and answers
with each piece's weights.

Long: only this brings supervised weights into a real vLLM. What is trained and asked when:
tests/cli/test_arms.py.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ttrl import TrainConfig
from ttrl.facts import ValidateFacts
from ttrl.loop.supervised_run import HeldOut, held_out_config, supervised_run
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl, write_jsonl
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
TASKS = get_sort_letters_tasks("validation", 6)


def greedy(model: Path, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of transformers' answer: texts differ if the last character is cut."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        found = policy.generate(**ids, max_new_tokens=8, do_sample=False)
    answer: list[int] = found[0, ids["input_ids"].shape[1] :].tolist()
    return answer


def test_one_server_answers_with_the_weights_of_every_mark(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1, layers=2, width=64, heads=2, context=128)
    write_jsonl(tmp_path / "data.jsonl", [dict(one) for one in sort_letters_examples(64)])
    settings = {"model": str(model), "seed": 0, "data": str(tmp_path / "data.jsonl")}
    settings |= {"lr": 3e-3, "batch_size": 32, "seq_len": 64, "device": "cpu"}
    config = TrainConfig(run="", model=str(model), iterations=1, max_tokens=8).resolved(False)
    asked = HeldOut(TASKS, held_out_config(config, "exact"))
    run = tmp_path / "run"
    last = supervised_run(run, settings, asked, by="steps", marks=[10, 20])
    folder = RunFolder(run)
    syncs = [folder.iteration(number).marker(ValidateFacts).sync for number in range(3)]
    # Nothing proves the starting model; what the recipe wrote came in place, with proof.
    assert [one.mode for one in syncs] == ["start", "reload", "reload"]
    assert syncs[0].canary_max_difference is None
    for one in syncs[1:]:
        assert one.canary_max_difference < 1e-3 and one.weights_compared > 1000
        assert one.fell_back is None
    assert len(list((run / "logs").glob("server*.log"))) == 1
    said = {}
    for number, policy in ((0, model), (2, last)):
        rows = read_jsonl(folder.iteration(number).path / "validation.jsonl")
        said[number] = [row["token_ids"] for row in rows]
        assert said[number] == [greedy(policy, row["messages"]) for row in rows]
    assert said[0] != said[2]

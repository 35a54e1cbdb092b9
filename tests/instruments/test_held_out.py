"""A study's own entropy batch: sampled once, kept, weighted, and sampled again when it has to be.

The stand-in samples as a server does, from the weights in the folder; the real one is asked in
tests/e2e/test_run.py.
"""

import dataclasses
import json
import random

import pytest
import torch
from support.studied_run import train
from support.tiny_models import VOCAB
from transformers import AutoModelForCausalLM

from ttrl.errors import RunFolderError
from ttrl.instruments.held_out import LEAST_ESS, AnswersFacts, HeldOut
from ttrl.instruments.study import study
from ttrl.instruments.study_run import last_words, study_run
from ttrl.records import Sample

LONGEST = 5


def prompt_ids(prompt):
    return [(11 * prompt + place) % VOCAB for place in range(prompt + 2)]


class Sampler:
    """Samples answers of at most 5 tokens to three prompts, and counts its calls."""

    def __init__(self, count):
        self.count = count
        self.models = []
        self.fail = 0

    def __call__(self, model, temperature):
        self.models.append(model)
        assert temperature == 1.0
        network = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float64).eval()
        generator = torch.Generator().manual_seed(7)
        drawn = random.Random(3).choices(range(3), k=self.count)
        answers = {}
        for prompt in range(3):
            numbers = [number for number, one in enumerate(drawn) if one == prompt]
            rows = torch.tensor([prompt_ids(prompt)] * len(numbers))
            logprobs = []
            with torch.no_grad():
                for _ in range(LONGEST):
                    logp = torch.log_softmax(network(rows).logits[:, -1], dim=1)
                    tokens = torch.multinomial(logp.exp(), 1, generator=generator)
                    # A server's own rounding.
                    logprobs.append(logp.gather(1, tokens).half().double())
                    rows = torch.cat([rows, tokens], dim=1)
            both = rows[:, -LONGEST:].tolist(), torch.cat(logprobs, dim=1).tolist()
            answers |= dict(zip(numbers, zip(*both, strict=True), strict=True))
        samples = []
        for number, prompt in enumerate(drawn):
            ids = prompt_ids(prompt)
            answer, logprobs = answers[number]
            one = Sample(
                task_id=f"held{prompt}",
                sample=number,
                messages=[{"role": "user", "content": str(prompt)}],
                prompt_token_ids=ids,
                token_ids=answer,
                logprobs=logprobs,
                finish_reason="length",
                reward=0.0,
            )
            samples.append(one)
        for one in samples[: self.fail]:
            one.reward, one.error = None, "RuntimeError: no server"
        return samples


def three_iterations(folder, model, rates=(1e-3, 1e-3, 1e-3)):
    iterations = folder / "iterations"
    state = None
    for number, rate in enumerate(rates, 1):
        model = train(iterations, number, model, state, lr=rate, objective="reinforce")
        state = model.parent / "state"
    return folder


@pytest.fixture(scope="module")
def whole_run(model_folder, tmp_path_factory):
    return three_iterations(tmp_path_factory.mktemp("whole"), model_folder())


@pytest.fixture
def held_out(tmp_path):
    return HeldOut("three prompts", "the request", tmp_path / "entropy", Sampler(30))


def facts_of(held_out, iteration):
    return json.loads((held_out.folder / f"{iteration:04d}.json").read_text())


def entropy_by_transformers(checkpoint, samples, reference):
    network = reference(checkpoint)
    total, logprobs = 0.0, []
    with torch.no_grad():
        for one in samples:
            ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
            logits = network(ids).logits[0, len(one.prompt_token_ids) - 1 : -1]
            logp = torch.log_softmax(logits, dim=-1)
            total -= float((logp.exp() * logp).sum())
            logprobs.append(float(logp[range(len(one.token_ids)), one.token_ids].sum()))
    return total / len(samples), torch.tensor(logprobs)


def test_one_batch_is_kept_for_all_checkpoints(whole_run, held_out, float64_reference):
    found = study_run(whole_run, dtype="fp64", kernel=6, held_out=held_out)
    start = yaml_model(whole_run, 1)
    assert held_out.sample.models == [start]
    steps = found["steps"]
    assert [one["entropy_batch"]["iteration"] for one in steps] == [1, 1, 1]
    shares = [one["entropy_batch"]["effective_size"] for one in steps]
    assert shares[0] == pytest.approx(1) and LEAST_ESS <= shares[2] < shares[1] < 1
    # The answers at hand, by another implementation.
    samples = held_out.sample(start, 1.0)
    entropy, before = entropy_by_transformers(start, samples, float64_reference)
    assert steps[0]["entropy"]["value"] == pytest.approx(entropy, rel=1e-6)
    second = yaml_model(whole_run, 2)
    _, after = entropy_by_transformers(second, samples, float64_reference)
    w = (after - before).exp()
    assert shares[1] == pytest.approx(float(w.sum() ** 2 / (w**2).sum() / len(w)), rel=1e-5)
    facts = facts_of(held_out, 1)
    assert facts["answers"] == 30 and facts["recorded"] and 0 < facts["mismatch"] < 1e-2
    stored = held_out.stored(1).packed
    labels = stored.labels != -100
    assert float(stored.logprobs[labels].sum()) == pytest.approx(float(before.sum()), rel=1e-6)
    # The whole step is measured, and on fresh answers: no pairs of one prompt.
    for one in steps:
        assert one["same_prompt"] == 0 and one["other_prompts"] != 0
        sources = one["other_prompts"] + one["earlier"] + one["decay"]
        assert one["first"] == pytest.approx(sources, rel=1e-9)
        ages = sum(age["value"] for age in one["ages"])
        assert one["earlier"] == pytest.approx(ages, rel=1e-9, abs=1e-15)
    assert [len(one["ages"]) for one in steps] == [0, 1, 2]
    assert found["logprob_fit"]["count"] == 18 and found["fit"]["count"] == 3
    # Another study finds everything there.
    calls = len(held_out.sample.models)
    assert study_run(whole_run, dtype="fp64", kernel=6, held_out=held_out) == found
    assert len(held_out.sample.models) == calls


def yaml_model(run, number):
    text = (run / "iterations" / f"{number:04d}" / "grpo.yaml").read_text()
    return next(line for line in text.splitlines() if line.startswith("model:")).split(": ")[1]


def test_answers_of_a_distant_policy_are_sampled_again(model_folder, tmp_path, held_out, caplog):
    run = three_iterations(tmp_path / "far", model_folder(), rates=(0.3, 1e-3, 1e-3))
    with caplog.at_level("INFO", logger="ttrl.instruments"):
        found = study_run(run, dtype="fp64", held_out=held_out)
    assert held_out.sample.models == [yaml_model(run, 1), yaml_model(run, 2)]
    batches = [one["entropy_batch"] for one in found["steps"]]
    assert [one["iteration"] for one in batches] == [1, 2, 2]
    assert all(one["effective_size"] >= LEAST_ESS for one in batches)
    assert "before iteration 2, less than 50%: sampling again" in caplog.text
    # An earlier checkpoint uses the nearest of both.
    assert held_out.stored(1).facts.iteration == 1 and held_out.stored(5).facts.iteration == 2


def test_a_study_with_its_own_output_uses_the_answers_of_the_run(whole_run, held_out, tmp_path):
    checkpoints = [whole_run / "iterations" / name / "checkpoint" for name in ("0001", "0003")]
    study(checkpoints[0], factors=[1.0], held_out=held_out)
    elsewhere = dataclasses.replace(
        held_out, folder=tmp_path / "output" / "entropy", also_in=held_out.folder
    )
    for checkpoint in checkpoints:
        found = study(checkpoint, factors=[1.0], held_out=elsewhere)
        assert found["entropy_batch"]["iteration"] == 1
    assert len(held_out.sample.models) == 1 and not elsewhere.folder.exists()
    # Its own answers are used next to the run's, and the earlier of two equally near ones wins.
    study(checkpoints[1], factors=[1.0], held_out=dataclasses.replace(elsewhere, also_in=None))
    assert [elsewhere.stored(number).facts.iteration for number in (1, 2, 3)] == [1, 1, 3]
    assert dataclasses.replace(elsewhere, request="another request").stored(1) is None


def test_other_requests_and_damaged_files_are_not_used(whole_run, held_out, caplog):
    checkpoint = whole_run / "iterations" / "0001" / "checkpoint"
    study(checkpoint, factors=[1.0], held_out=held_out)
    assert held_out.stored(1) is not None
    other = dataclasses.replace(held_out, request="another request")
    assert other.stored(1) is None
    path = held_out.folder / "0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert held_out.stored(1) is None and "its digest differs" in caplog.text
    study(checkpoint, factors=[1.0], held_out=held_out)
    assert len(held_out.sample.models) == 2 and held_out.stored(1) is not None
    (held_out.folder / "0001.json").write_text("{")
    assert held_out.stored(1) is None


def test_a_batch_without_the_trainers_log_probabilities_is_for_its_own_policy(
    whole_run, held_out, tmp_path
):
    """After a kill between sampling and the first pass: its log-probabilities are the server's."""
    checkpoint = whole_run / "iterations" / "0001" / "checkpoint"
    whole = study(checkpoint, factors=[1.0], dtype="fp64", held_out=held_out)
    facts = AnswersFacts(**(facts_of(held_out, 1) | {"recorded": False}))
    (held_out.folder / "0001.json").write_text(json.dumps(facts.to_json()))
    assert held_out.stored(2) is None
    again = study(checkpoint, factors=[1.0], dtype="fp64", held_out=held_out)
    assert len(held_out.sample.models) == 1
    assert again["slope"] == pytest.approx(whole["slope"], rel=1e-9)
    assert held_out.stored(2) is not None


def test_draws_without_an_answer_are_counted(whole_run, held_out, caplog):
    checkpoint = whole_run / "iterations" / "0001" / "checkpoint"
    held_out.sample.fail = 4
    found = study(checkpoint, factors=[1.0], held_out=held_out)
    assert found["sequences"] == 26 and found["entropy_batch"]["failed"] == 4
    assert "4 of 30 draws have no answer" in caplog.text
    held_out.sample.fail = 30
    with pytest.raises(RunFolderError, match="no answer to three prompts can be used: RuntimeErr"):
        study(checkpoint, factors=[1.0], held_out=dataclasses.replace(held_out, request="new"))


def test_the_last_words_say_when_the_answers_were_sampled(whole_run, held_out):
    found = study_run(whole_run, dtype="fp64", held_out=held_out)
    said = " ".join(last_words(found).split())
    assert "The entropy batch (three prompts) was sampled before iterations 1;" in said
    least = min(one["entropy_batch"]["effective_size"] for one in found["steps"])
    assert f"at least {least:.0%} of them are effective" in said

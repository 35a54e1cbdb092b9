"""Sampler against trainer: what is judged and by which limits, what the error names, and what each
check of a cause sees.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support.facts import mark

from ttrl import TrainConfig
from ttrl.configs.run import LIMIT_NAMES
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.errors import DriftError, ServerError
from ttrl.facts import ComparedTokens, Difference, SamplerTrainer, Sync, read_facts
from ttrl.monitoring import drift as instrument
from ttrl.monitoring.drift import (
    DEFAULT_LIMITS,
    ENOUGH_TOKENS,
    Judged,
    check_drift,
    limits_of,
)
from ttrl.monitoring.drift_causes import Evidence, WorstToken, likely_causes, worst_tokens
from ttrl.records import Sample, TaskResult
from ttrl.run_folder.folder import DRIFT_FILE as FILE_NAME
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import write_jsonl


def difference(figures):
    return read_facts(Difference, figures)


def exceeded(figures, limits):
    return instrument.exceeded(difference(figures), limits)


def judged_figures(figures, version, training):
    return instrument.judged_figures(read_facts(SamplerTrainer, figures or {}), version, training)


GOOD = {
    "tokens": 4000,
    "not_finite": 0,
    "mean": 1e-6,
    "p999": 1e-5,
    "ess": 0.999999,
    "outside": 0.0,
}
BAD = {"mean": 0.07, "p999": 1.2, "ess": 0.8, "outside": 0.3}


def config(**changes):
    values = {"run": "r", "model": "m", "iterations": 3, "device": "cpu", "dtype": "fp32"}
    return TrainConfig(**(values | changes))


# What is beyond a limit


def test_what_rounding_explains_is_within_every_limit():
    for limits in DEFAULT_LIMITS.values():
        assert exceeded(GOOD, limits) == []


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_each_limit_works_alone_and_names_both_numbers(name):
    limits = limits_of(config())
    (said,) = exceeded(GOOD | {name: BAD[name]}, limits)
    assert f"{BAD[name]:.3g}" in said and f"{getattr(limits, name):g}" in said
    assert exceeded(GOOD | {name: BAD[name]}, dataclasses.replace(limits, **{name: None})) == []


def test_with_few_tokens_only_the_mean_is_judged():
    few = GOOD | BAD | {"tokens": ENOUGH_TOKENS - 1, "mean": 1e-6}
    assert exceeded(few, limits_of(config())) == []
    assert len(exceeded(few | {"tokens": ENOUGH_TOKENS}, limits_of(config()))) == 3


def test_a_handful_of_tokens_with_one_outlier_is_no_drift_and_a_handful_that_is_all_wrong_is():
    bf16 = limits_of(config(dtype="bf16"))
    assert exceeded({"tokens": 5, "not_finite": 0, "mean": (4 * 0.02 + 1.0) / 5}, bf16) == []
    assert exceeded({"tokens": 5, "not_finite": 0, "mean": 2.0}, bf16)
    assert exceeded({"tokens": 5, "not_finite": 0, "mean": 0.01}, limits_of(config()))


def test_numbers_that_are_not_finite_are_always_too_many():
    assert "3 tokens" in exceeded(GOOD | {"tokens": 3, "not_finite": 3}, limits_of(config()))[0]


def test_limits_follow_dtype_and_device_and_can_be_changed():
    assert limits_of(config(dtype="bf16")) == DEFAULT_LIMITS["bf16", "cpu"]
    assert limits_of(config(device="cuda")) == DEFAULT_LIMITS["fp32", "cuda"]
    changed = limits_of(config(drift_limits={"mean": 3.0, "ess": None}))
    assert changed == dataclasses.replace(DEFAULT_LIMITS["fp32", "cpu"], mean=3.0, ess=None)
    assert config(drift_limits={"mean": 0, "worst": 1}).watch_problems() == [
        "drift_limits: mean is 0; it must be above 0, or null for no limit",
        "drift_limits: unknown limit 'worst'; choose from mean, p999, ess, outside",
    ]


def test_policy_lag_is_no_drift():
    found = GOOD | BAD | {"by_version": {"2": GOOD | BAD, "3": GOOD}}
    # The policy that training starts from.
    assert judged_figures(found, 3, {}) == Judged(
        3, difference(GOOD), read_facts(SamplerTrainer, found)
    )
    assert [judged_figures(figures, 4, {}) for figures in (found, GOOD, None)] == [None] * 3
    own = BAD | {"version": 2, "tokens": 50}
    # … or the one that sampled, as it was.
    assert judged_figures(found | {"own_weights": own}, 4, {}) == Judged(
        2, read_facts(ComparedTokens, own), read_facts(ComparedTokens, own)
    )
    assert judged_figures(found | {"own_weights": own}, 3, {}).version == 3
    assert judged_figures(found | {"own_weights": own | {"tokens": 0}}, 4, {}) is None


def test_a_base_in_four_bits_is_judged_from_its_first_checkpoint_on():
    found = {"by_version": {"0": BAD, "1": BAD}}
    assert judged_figures(found, 0, {"lora_base_dtype": "nf4"}) is None
    assert (
        judged_figures(found, 1, {"lora_base_dtype": "nf4"}).figures
        == judged_figures(found, 0, {}).figures
        == difference(BAD)
    )
    old = {"own_weights": BAD | {"version": 0, "tokens": 50}}
    assert (
        judged_figures(old, 1, {"lora_base_dtype": "nf4"}) is None
        and judged_figures(old, 1, {}).version == 0
    )


# A run folder


def sampled(tokenizer, task):
    """A task with two samples."""
    messages = [{"role": "user", "content": f"word {task}"}]
    samples = []
    for number, text in enumerate(("yes yes", "no no no")):
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        samples.append(
            Sample(
                task_id=task,
                sample=number,
                messages=messages,
                text=text,
                prompt_token_ids=tokenizer.encode(f"<|user|>word {task}<|end|><|assistant|>"),
                token_ids=ids,
                logprobs=[-1.0 - place for place in range(len(ids))],
                reward=float(number),
                finish_reason="stop",
                weights_version=1,
            )
        )
    return TaskResult(task_id=task, messages=messages, samples=samples)


class Run:
    """Iteration 2 of a run: two tasks with two samples each, packed; the policy before it is that
    of iteration 1.
    """

    def __init__(self, path, model):
        from transformers import AutoTokenizer

        self.folder, self.said = RunFolder(path), []
        self.console = SimpleNamespace(line=self.said.append)
        for number, phase in enumerate(("prepare", "train")):
            checkpoint = self.folder.iteration(number).path / "checkpoint"
            checkpoint.parent.mkdir(parents=True)
            checkpoint.symlink_to(model)
            mark(self.folder.iteration(number), phase, [], {"seconds": 1.0, "trained": True})
        self.iteration = self.folder.iteration(2)
        self.path = self.iteration.path
        tokenizer = AutoTokenizer.from_pretrained(model)
        groups = [sampled(tokenizer, task) for task in ("a", "b")]
        rows = [sample.to_json() for group in groups for sample in group.samples]
        write_jsonl(self.path / "rollouts.jsonl", rows)
        sync = {"mode": "reload", "canary_max_difference": 2e-6, "fell_back": None}
        mark(self.iteration, "rollouts", ["rollouts.jsonl"], {"seconds": 1.0, "sync": sync})
        self.packed = self.pack(groups, TaskResultTokenizer(tokenizer))
        (self.path / "grpo.yaml").write_text("temperature: 1.0\n")

    def pack(self, groups, tokenize):
        sequences = [one for group in groups for one in tokenize(group, [-1.0, 1.0])]
        packed = packed_tensors_from_tokenized_results(sequences, seq_len=64, pad_id=0)
        packed.save(self.path / "packed.safetensors")
        facts = {"seconds": 1.0, "tokenization": dataclasses.asdict(tokenize.counts)}
        mark(self.iteration, "pack", ["packed.safetensors"], facts)
        return packed

    def trained(self, figures, worst=()):
        """Training has compared the tokens, with these figures."""
        drift = figures | {"worst": list(worst), "by_version": {"1": figures}}
        steps = [{"sampler_trainer": drift, "lr": 1.0}]
        mark(self.iteration, "train", [], {"seconds": 1.0, "trained": True, "steps": steps})
        return read_facts(SamplerTrainer, drift)


@pytest.fixture
def run(tmp_path, tiny_model):
    return Run(tmp_path / "run", tiny_model)


def worst_of(packed, task, sample, place):
    """The entry of one token in the recipe's list."""
    number = next(
        n for n, one in enumerate(packed.samples) if (one.task_id, one.sample) == (task, sample)
    )
    row = packed.samples[number].row
    positions = (
        ((packed.sample_ids[row] == number) & (packed.labels[row] != -100))
        .nonzero()
        .flatten()
        .tolist()
    )
    sampler = float(packed.logprobs[row, positions[place]])
    return {
        "row": row,
        "position": positions[place],
        "version": 1,
        "trainer": -9.0,
        "sampler": sampler,
    }


def test_within_the_limits_nothing_happens(run):
    run.trained(GOOD)
    assert check_drift(config(), run.folder, 2, run.console) is None
    assert not (run.path / FILE_NAME).exists() and not run.said


def test_beyond_a_limit_the_run_ends_with_numbers_tokens_and_causes(run):
    run.trained(GOOD | BAD, [worst_of(run.packed, "b", 1, 2)])
    with pytest.raises(DriftError) as caught:
        check_drift(config(), run.folder, 2, run.console)
    message = str(caught.value)
    assert (
        "iteration 2" in message
        and "0.07 (limit 0.0002)" in message
        and "4,000 tokens of policy 1" in message
    )
    assert "sampler -3.0000, trainer -9.0000: task 'b', sample 1, token 2" in message
    assert "ruled out   temperature: 1 on both sides" in message
    assert "the canary differed by at most 2e-06 nats" in message
    assert "no[" in message.replace(" ", "") and str(run.path) in message
    report = json.loads((run.path / FILE_NAME).read_text())
    assert (
        report["figures"]["mean"] == 0.07
        and len(report["causes"]) == 11
        and report["worst"][0]["sample"] == 1
    )
    # Again when the run is continued: the marker of the phase alone is no reason to go on.
    with pytest.raises(DriftError):
        check_drift(config(), run.folder, 2, run.console)


def test_an_older_policy_is_judged_by_what_its_own_weights_compute(run):
    """Iteration 3 starts from policy 2, and policy 1 sampled its tokens, as those of `run`."""
    path = run.folder.iteration(3).path
    path.mkdir()
    for file in ("rollouts.jsonl", "packed.safetensors", "grpo.yaml"):
        (path / file).write_bytes((run.path / file).read_bytes())
    run.trained(GOOD)
    # Of policy 2.
    mark(
        run.folder.iteration(2),
        "validate",
        [],
        {"sync": Sync(mode="reload", canary_max_difference=0.5)},
    )
    mark(
        run.folder.iteration(1),
        "validate",
        [],
        {"sync": Sync(mode="reload", canary_max_difference=2e-6)},
    )

    def trained(own):
        drift = (
            GOOD
            | BAD
            | {
                "by_version": {"1": GOOD | BAD},
                "worst": [],
                "own_weights": own | {"version": 1, "rows": 4},
            }
        )
        run.folder.iteration(3).unmark("train")
        mark(
            run.folder.iteration(3),
            "train",
            [],
            {"trained": True, "steps": [{"sampler_trainer": drift, "lr": 1.0}]},
        )

    trained(GOOD)
    assert check_drift(config(off_policy_steps=1), run.folder, 3, run.console) is None
    trained(GOOD | BAD | {"worst": [worst_of(run.packed, "b", 1, 2)]})
    with pytest.raises(DriftError, match="4,000 tokens of policy 1") as caught:
        check_drift(config(off_policy_steps=1), run.folder, 3, run.console)
    message = str(caught.value)
    assert (
        "task 'b', sample 1, token 2" in message
        and "ruled out   stale or wrong weights: after reload" in message
    )
    assert "worst" not in json.loads((path / FILE_NAME).read_text())["figures"]


def test_what_was_too_far_is_forgotten_under_wider_limits(run):
    run.trained({"tokens": 50, "not_finite": 0, "mean": 0.5})
    with pytest.raises(
        DriftError, match=r"TTRL_REDO=2 in front of it, or pass train\(\.\.\., redo=2\)"
    ):
        check_drift(config(), run.folder, 2, run.console)
    assert (run.path / FILE_NAME).exists()
    assert check_drift(config(drift_limits={"mean": 1.0}), run.folder, 2, run.console) is None
    assert not (run.path / FILE_NAME).exists()


def test_a_warning_says_the_same_and_goes_on(run):
    run.trained(GOOD | BAD, [worst_of(run.packed, "a", 0, 1)])
    report = check_drift(config(drift="warn"), run.folder, 2, run.console)
    assert (
        report is not None
        and "0.07" in run.said[0]
        and any("task 'a', sample 0, token 1" in line for line in run.said)
    )


def test_a_pack_that_cannot_be_read_hides_the_tokens_and_nothing_else(run):
    run.trained(GOOD | BAD, [worst_of(run.packed, "a", 0, 1)])
    (run.path / "packed.safetensors").write_bytes(b"gone")
    with pytest.raises(DriftError, match=r"(?s)not available: PackError.*stale or wrong weights"):
        check_drift(config(), run.folder, 2, run.console)


def test_the_server_is_asked_how_it_runs_and_may_be_gone(run):
    run.trained(GOOD | BAD)
    told = {
        "vllm_config": {"model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logits"}}
    }
    with pytest.raises(DriftError, match=r"FOUND +logprobs mode of the server: raw_logits"):
        check_drift(config(), run.folder, 2, run.console, lambda path: told)

    def gone(path):
        raise ServerError("gone")

    with pytest.raises(DriftError, match="as the run's config sets"):
        check_drift(config(), run.folder, 2, run.console, gone)


def test_tokens_are_shown_as_they_were_sampled(run):
    entries = [worst_of(run.packed, "b", 1, 2), worst_of(run.packed, "a", 0, 0)]
    drift = run.trained(GOOD | BAD, [*entries, entries[0] | {"version": 0}])
    first, second = worst_tokens(run.folder, 2, drift, 1)  # the one of another version is left out
    assert (
        (first.task_id, first.sample, first.place) == ("b", 1, 2)
        and first.sampler == -3.0
        and first.as_sent
    )
    assert (
        first.before.endswith("no"[: len(first.before)][-1])
        and second.place == 0
        and second.before.endswith("<|assistant|>")
    )
    rows = [json.loads(line) for line in (run.path / "rollouts.jsonl").read_text().splitlines()]
    rows[3]["prompt_token_ids"][0] += 1  # the server sampled from another prompt
    write_jsonl(run.path / "rollouts.jsonl", rows)
    first, second = worst_tokens(run.folder, 2, drift, 1)
    assert first.as_sent is False and second.as_sent is True


def test_the_same_token_after_the_same_tokens_is_named_once(run):
    entries = [worst_of(run.packed, "b", 1, 2), worst_of(run.packed, "b", 1, 2)]
    assert len(worst_tokens(run.folder, 2, run.trained(GOOD | BAD, entries), 1)) == 1


# Causes, one by one


def verdicts(**changes):
    given = {"config": config(), "version": 1, "drift": SamplerTrainer(), "model": Path("gone")}
    evidence = Evidence(**(given | changes))
    causes = likely_causes(evidence)
    order = [cause.verdict for cause in causes]
    assert order == sorted(order, key=("found", "could not be checked", "ruled out").index)
    return {cause.name.split()[0]: cause for cause in causes}


def test_a_mixture_without_router_replay_is_told_of_it():
    mixture = {"num_experts": 8}
    assert verdicts(shape={"vocab_size": 9})["choice"].verdict == "ruled out"
    assert verdicts(shape=mixture, recipe={"router_replay": True})["choice"].verdict == "ruled out"
    cause = verdicts(shape=mixture)["choice"]
    assert cause.verdict == "could not be checked" and "router_replay=true" in cause.line()


def token(as_sent):
    return WorstToken("t", 1, 2, 9, 7, "x", "a", "b", -1.0, -2.0, as_sent)


def checkpoint(folder: Path, rows=8, dtype=torch.float32):
    folder.mkdir(exist_ok=True)
    save_file(
        {"model.embed_tokens.weight": torch.zeros(rows, 2, dtype=dtype)},
        folder / "model.safetensors",
    )
    return folder


FOUND = [
    ("temperature", {"recipe": {"temperature": 0.7}}, "sampled with 1, trained with 0.7"),
    ("top-p,", {"config": config(sampling={"extra_body": {"top_k": 20}})}, "top_k=20"),
    ("top-p,", {"config": config(sampling={"repetition_penalty": 1.1})}, "repetition_penalty=1.1"),
    (
        "generation_config.json",
        {
            "config": config(server={"generation_config": "auto"}),
            "generation": {"top_k": 20, "top_p": 0.8},
        },
        "top_p=0.8, top_k=20",
    ),
    (
        "generation_config.json",
        {"server": {"model_config": {"override_generation_config": {"top_k": 5}}}},
        "overrides",
    ),
    ("logprobs", {"config": config(server={"logprobs-mode": "raw_logits"})}, "raw_logits"),
    (
        "logprobs",
        {"config": config(server={"logprobs_mode": "raw_logprobs"}, temperature=0.8)},
        "raw_logprobs",
    ),
    ("chat", {"tokens": (token(True), token(False))}, "1 of the 2 worst tokens"),
    ("chat", {"tokenization": {"unaligned": 4}}, "4 tokens could not be aligned"),
    (
        "stale",
        {"sync": Sync(mode="reload", canary_max_difference=0.4)},
        "differed by at most 0.4 nats, more than 0.001",
    ),
    (
        "dtype",
        {"server": {"model_config": {"dtype": "torch.bfloat16"}}},
        "in bfloat16, the trainer in float32",
    ),
    ("dtype", {"config": config(server={"kv_cache_dtype": "fp8"})}, "kv-cache-dtype fp8"),
    ("dtype", {"server": {"model_config": {"quantization": "awq"}}}, "quantization awq"),
    ("RoPE", {"config": config(server={"hf_overrides": {"rope_theta": 5}})}, "hf-overrides"),
    (
        "RoPE",
        {
            "shape": {
                "rope_parameters": {"rope_type": "longrope"},
                "max_position_embeddings": 4096,
            },
            "server": {"model_config": {"max_model_len": 8192}},
        },
        "context is 8192 on the server and 4096 in the trainer",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "said"), FOUND, ids=[f"{n}-{s[:12]}" for n, _, s in FOUND]
)
def test_a_cause_that_is_there_is_found(name, changes, said):
    cause = verdicts(**changes)[name]
    assert cause.verdict == "found" and said in cause.detail and cause.way_out
    assert cause.line().startswith("  FOUND") and cause.way_out in cause.line()


def test_what_lies_in_the_checkpoint_is_read(tmp_path):
    shape = {"vocab_size": 8}
    assert verdicts(model=checkpoint(tmp_path / "m"), shape=shape)["padding"].verdict == "ruled out"
    cause = verdicts(model=checkpoint(tmp_path / "m", rows=10), shape=shape)["padding"]
    assert cause.verdict == "found" and "10 rows; config.json says 8" in cause.detail
    half = checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    # Both load the same rounded numbers.
    assert verdicts(model=half)["dtype"].verdict == "ruled out"
    assert verdicts(model=half, recipe={"checkpoint_dtype": "bf16"})["dtype"].verdict == "found"


def test_the_scale_of_adapters_is_compared(tmp_path):
    recipe = {"lora_rank": 8, "lora_alpha": 16.0}
    assert verdicts()["scale"].verdict == "ruled out"
    assert verdicts(recipe=recipe, model=tmp_path)["scale"].verdict == "could not be checked"
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    assert verdicts(recipe=recipe, model=tmp_path)["scale"].verdict == "ruled out"
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    assert (
        "4 in adapter_config.json, 2 in the trainer"
        in verdicts(recipe=recipe, model=tmp_path)["scale"].detail
    )


def test_a_sound_run_has_no_cause(tmp_path):
    found = verdicts(
        recipe={"temperature": 1.0, "context": None},
        model=checkpoint(tmp_path / "m"),
        shape={"vocab_size": 8, "rope_parameters": {"rope_type": "default"}},
        generation={"top_k": 20, "repetition_penalty": 1.0},
        sync=Sync(mode="reload", canary_max_difference=1e-6),
        tokens=(token(True),),
        drift=SamplerTrainer(by_position=[1e-6, 1e-6, 1e-6, 2e-6]),
    )
    assert {cause.verdict for cause in found.values()} == {"ruled out"}, [
        c.line() for c in found.values()
    ]
    assert "2 times" in found["RoPE"].detail


def test_without_evidence_nothing_is_claimed():
    found = verdicts()
    unknown = {name for name, cause in found.items() if cause.verdict == "could not be checked"}
    assert unknown == {"temperature", "chat", "stale", "padding"}
    assert "found" not in {cause.verdict for cause in found.values()}

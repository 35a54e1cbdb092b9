"""Rollouts of several turns on a real vLLM server: the log-probabilities in packed rows are those
that the trainer computes.

Only vLLM says whether a next turn goes on from the tokens of the one before.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from support.tiny_models import load_policy_in
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ttrl import Task, TaskResultTokenizer, get_task_results, packed_tensors_from_tokenized_results
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.server.vllm import VLLMServer
from ttrl.tasks.task import RolloutLimits

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


CONTEXT = 256
# One token per character, roles in plain words: whatever the model says reads and tokenizes as it
# was generated. With strip, the beginning of earlier answers is replaced, as thinking is left out
# by other templates; so an empty answer reads otherwise, too.
TEMPLATE = (
    "{%- for m in messages -%}{%- set strips = strip is defined and m.role == 'assistant' -%}"
    "{{- m.role + ':' + ('(...)' + m.content[2:] if strips else m.content) + '<|end|>' -}}{%- "
    "endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)


def write_model(folder: Path) -> Path:
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's CPU attention has no kernel for heads of 16
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    folder = tmp_path_factory.mktemp("multi_turn")
    model = write_model(folder / "model")
    arguments = {"dtype": "float32", "max_model_len": CONTEXT}
    with VLLMServer(
        model, served_model_name="m", log_path=folder / "server.log", **arguments
    ) as running:
        running.folder = model
        yield running


def sample(server, tasks, **arguments):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await get_task_results(tasks, client, "m", pbar=False, **arguments)

    return asyncio.run(main())


async def three_turns(chat):
    """The model talks; what it is told between depends on what it said."""
    choice = await chat("Begin.")
    for _ in range(2):
        choice = await chat(f"You said {len(choice.message.content)} letters. Go on.")
    return float(len(choice.message.content))


def packed_logprobs(server, results):
    """(the sampler's, the trainer's) of all packed labels, and the pack."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(server.folder)
    tokenize = TaskResultTokenizer(tokenizer)
    sequences = [one for result in results for one in tokenize(result, [1.0] * len(result.graded))]
    assert (tokenize.counts.mismatches, tokenize.counts.unaligned) == (0, 0)
    packed = packed_tensors_from_tokenized_results(sequences, seq_len=3 * CONTEXT, pad_id=0)
    policy = load_policy_in(server.folder)
    with torch.no_grad():
        out = policy(
            packed.tokens, packed.labels, packed.group_ids, packed.parent_ids, packed.input_pos
        )
    return (
        packed.logprobs[packed.labels != IGNORE_LABEL].double(),
        out.logprobs.double(),
        packed,
        sequences,
    )


@pytest.mark.parametrize("strip", [False, True])
def test_packed_logprobs_of_several_turns_are_the_trainers(server, strip):
    tasks = [
        Task([{"role": "system", "content": f"Game {n}."}], rollout=three_turns, id=f"g{n}")
        for n in range(3)
    ]
    params = {
        "temperature": 1.0,
        "max_tokens": 12,
        **({"chat_template_kwargs": {"strip": True}} if strip else {}),
    }
    results = sample(server, tasks, n=4, params=params, weights_version=2)
    stats = results.stats
    assert (stats.num_graded, stats.num_failed, stats.num_turns) == (12, 0, 36), stats.failures()
    assert stats.num_breaks == (24 if strip else 0)
    sampler, trainer, packed, sequences = packed_logprobs(server, results)
    assert len(sequences) == (36 if strip else 12)
    generated = sum(len(s.token_ids) for s in results.samples)
    assert packed.num_trained == len(sampler) == generated == stats.completion_tokens
    assert not sampler.isnan().any()
    assert (sampler - trainer).abs().max() < 1e-3, (sampler - trainer).abs().max()
    assert sampler.min() < -1  # of a random model: a comparison of zeros would show nothing
    # Each generated token is trained exactly once.
    tokens = sorted(t for s in results.samples for t in s.token_ids)
    assert sorted(packed.labels[packed.labels != IGNORE_LABEL].tolist()) == tokens
    for s in results.samples:
        assert [turn.continues for turn in s.turns] == ([None] * 3 if strip else [None, 0, 1])
        assert {turn.finish_reason for turn in s.turns} <= {"stop", "length"}


async def until_full(chat):
    while True:
        await chat("x" * 20, max_tokens=50)


def test_a_conversation_that_fills_the_context(server):
    tasks = [
        Task(
            [{"role": "user", "content": "hi"}],
            lambda choice: float(len(choice.messages)),
            rollout=until_full,
            id="full",
        ),
        Task(
            [{"role": "user", "content": "y" * 2 * CONTEXT}],
            lambda choice: 1.0,
            rollout=until_full,
            id="too long",
        ),
    ]
    # An end of turn within a text would be left out of it, so that the next turn could not continue
    # it.
    end = PreTrainedTokenizerFast.from_pretrained(server.folder).eos_token_id
    results = sample(server, tasks, params={"logit_bias": {str(end): -100}})
    full, too_long = results.samples
    assert (
        full.error is None
        and full.finish_reason == "length"
        and full.reward == 1 + 2 * len(full.turns)
    )
    lengths = [turn.num_tokens for turn in full.turns]
    # A shorter answer where there was room for one.
    assert lengths[:-1] == [50] * (len(lengths) - 1) and lengths[-1] < 50
    assert all(turn.continues is not None for turn in full.turns[1:])
    whole = (
        len(full.prompt_token_ids)
        + sum(lengths)
        + sum(len(turn.prompt_token_ids) for turn in full.turns[1:])
    )
    assert whole == CONTEXT
    assert too_long.error.startswith(
        "RolloutLimitError: task 'too long', sample 0: the conversation fills the model's context"
    )


def test_limits_of_tokens(server):
    limits = RolloutLimits(tokens=60)
    task = Task(
        [{"role": "user", "content": "hi"}],
        lambda choice: 1.0,
        rollout=until_full,
        id="t",
        limits=limits,
    )
    (one,) = sample(server, [task], params={"ignore_eos": True}).samples
    assert (
        [turn.num_tokens for turn in one.turns] == [50, 10]
        and len(one.token_ids) == 60
        and one.finish_reason == "length"
    )
    assert json.dumps(one.to_json())


def test_replies_that_are_ended_early(server):
    """Streams: on_chunk sees every reply, and may end it; the conversation goes on after what there
    is.
    """
    seen = {}

    def on_chunk(chunk, completion):
        for choice in completion.choices:
            seen[completion.id] = len(choice.logprobs.content) if choice.logprobs else 0
            if seen[completion.id] >= 5:
                raise StopIteration

    end = PreTrainedTokenizerFast.from_pretrained(server.folder).eos_token_id
    task = Task([{"role": "user", "content": "hi"}], rollout=three_turns, id="t")
    params = {"max_tokens": 40, "logit_bias": {str(end): -100}}
    results = sample(server, [task], n=2, params=params, on_chunk=on_chunk)
    for one in results.samples:
        assert (
            one.error is None
            and [turn.finish_reason for turn in one.turns] == ["stopped_early"] * 3
        )
        assert all(5 <= turn.num_tokens < 40 for turn in one.turns)
        assert [turn.continues for turn in one.turns] == [None, 0, 1]
    assert len(seen) == 6
    assert end not in [token for one in results.samples for token in one.token_ids]

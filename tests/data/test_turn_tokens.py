"""Samples of several turns as sequences, and samples of servers that gave no ids, by the chat
template.
"""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results, unpack
from ttrl.data.packing.packed import normaliser
from ttrl.data.shaping import answer_end
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.errors import TokenizationError
from ttrl.records import Sample, TaskResult, Turn

ASK = [{"role": "user", "content": "ask"}]
EOT = "<|im_end|>"


def task(*samples):
    return TaskResult(task_id="t", messages=ASK, samples=list(samples))


def two_turns(**changes):
    """Prompt 1 2 3, generated 7 8, told 4 5, generated 9."""
    turns = [
        Turn(
            messages=[],
            follows=-1,
            reply={"role": "assistant", "content": "x"},
            prompt_token_ids=[1, 2, 3],
            num_tokens=2,
        ),
        Turn(
            messages=ASK,
            follows=0,
            reply={"role": "assistant", "content": "y"},
            prompt_token_ids=[4, 5],
            continues=0,
            num_tokens=1,
        ),
    ]
    for turn, version, reason in zip(turns, (3, 4), ("length", "stop"), strict=True):
        turn.weights_version, turn.finish_reason = version, reason
    values = {
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [7, 8, 9],
        "logprobs": [-0.5, math.nan, -0.25],
    }
    return Sample(
        task_id="t",
        sample=2,
        messages=ASK,
        turns=turns,
        reward=1.0,
        text="y",
        finish_reason="stop",
        **(values | changes),
    )


def test_each_turn_keeps_its_versions_and_logprobs():
    (one,) = TaskResultTokenizer()(task(two_turns()), [0.5])
    assert one.token_ids == [1, 2, 3, 7, 8, 4, 5, 9] and one.assistant_mask == [False] * 3 + [
        True
    ] * 2 + [False] * 2 + [True]
    assert (
        one.token_versions == [3, 3, 4, 4, 4]
        and one.weights_version == 4
        and one.finish_reason == "stop"
    )
    assert [logprob for logprob in one.logprobs if not math.isnan(logprob)] == [-0.5, -0.25]
    packed = packed_tensors_from_tokenized_results([one], seq_len=16, pad_id=0)
    assert packed.labels[0, 2:7].tolist() == [7, 8, -100, -100, 9]
    assert packed.weights_version[0, 2:7].tolist() == [3, 3, -1, -1, 4]
    (again,) = unpack(packed)
    assert (again.token_ids, again.assistant_mask) == (one.token_ids, one.assistant_mask)


def test_a_turn_that_continues_nothing_is_a_sequence_of_its_own():
    sample = two_turns()
    sample.turns[1].continues, sample.turns[1].prompt_token_ids = None, [1, 2, 3, 4]
    first, second = TaskResultTokenizer()(task(sample), [0.5])
    assert (first.token_ids, second.token_ids) == ([1, 2, 3, 7, 8], [1, 2, 3, 4, 9])
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert (first.weights_version, second.weights_version) == (
        3,
        4,
    ) and first.token_versions is second.token_versions is None
    assert [first.share, second.share] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_sample_of_several_sequences_counts_once(aggregation):
    """The loss of Σ w·ℓ / Z with one sample cut in two is that of the mean over samples: here ℓ =
    1, but 5 for the cut one's.
    """
    cut, whole = two_turns(), two_turns()
    cut.turns[1].continues, cut.turns[1].prompt_token_ids = None, [1, 2, 3, 4]
    results = TaskResultTokenizer()(task(cut, whole), [5.0, 1.0])
    length = 10 if aggregation == "constant" else None
    packed = packed_tensors_from_tokenized_results(
        results, seq_len=12, pad_id=0, aggregation=aggregation, constant_length=length
    )
    expected = {"token": (3 * 5 + 3) / 6, "sequence": (5 + 1) / 2, "constant": (3 * 5 + 3) / 20}[
        aggregation
    ]
    trained = packed.labels >= 0
    loss = float((packed.weights * packed.advantages)[trained].sum())
    assert loss / normaliser(packed) == pytest.approx(expected)
    parts = [packed.rows([row]) for row in range(packed.num_rows)]
    assert sum(map(normaliser, parts)) == pytest.approx(normaliser(packed))
    assert sorted(one.share for one in unpack(packed)) == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(
    ("turn", "changes", "message"),
    [
        (0, {"num_tokens": 3}, "task 't', sample 2: 3 token ids, but its 2 turns have 4 tokens"),
        (
            0,
            {"prompt_token_ids": None},
            "task 't', sample 2, turn 0: the server returned no token ids",
        ),
        (0, {"prompt_token_ids": []}, "turn 0: the server returned no token ids of its prompt"),
        (1, {"continues": 1}, "turn 1: it continues turn 1, but that is not an earlier turn"),
        (None, {"token_ids": None}, "the server returned no token ids"),
    ],
)
def test_what_does_not_fit_is_named(turn, changes, message):
    sample = two_turns()
    if turn is None:
        sample = replace(sample, **changes)
    else:
        sample.turns[turn] = replace(sample.turns[turn], **changes)
    with pytest.raises(TokenizationError, match=message):
        TaskResultTokenizer()(task(sample), [1.0])


def test_text_of_turns_is_compared_with_their_ids(tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    sample = two_turns(
        token_ids=[*ids("x"), tokenizer.eos_token_id, *ids("<t>hm</t>y")], logprobs=None
    )
    sample.turns[1].num_tokens = len(ids("<t>hm</t>y"))
    tokenize = TaskResultTokenizer(tokenizer)
    tokenize(task(sample), [1.0])
    assert tokenize.mismatches == 1  # text that is not there
    sample.turns[1].reply["reasoning"] = "hm"
    tokenize(task(sample), [1.0])
    assert tokenize.mismatches == 1  # the server took the reasoning out


def test_the_strings_of_each_turn_are_checked_against_its_ids(tokenizer):
    ids = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abc"]
    tokenize = TaskResultTokenizer(tokenizer)
    (one,) = tokenize(
        task(two_turns(token_ids=ids, logprobs=[-1.0, -2.0, -3.0], logprob_tokens=["a", "b", "c"])),
        [1.0],
    )
    assert tokenize.counts.unaligned == 0 and [p for p in one.logprobs if not math.isnan(p)] == [
        -1.0,
        -2.0,
        -3.0,
    ]
    (one,) = tokenize(
        task(two_turns(token_ids=ids, logprobs=[-1.0, -2.0, -3.0], logprob_tokens=["a", "x", "c"])),
        [1.0],
    )
    assert tokenize.counts.unaligned == 1 and [p for p in one.logprobs if not math.isnan(p)] == [
        -1.0,
        -3.0,
    ]
    with pytest.raises(TokenizationError, match="task 't', sample 2, turn 1: 1 of 1 tokens differ"):
        tokenize(
            task(
                two_turns(
                    token_ids=ids, logprobs=[-1.0, -2.0, -3.0], logprob_tokens=["a", "b", "a"]
                )
            ),
            [1.0],
        )


@st.composite
def conversations(draw):
    """Turns that continue each other in any tree: each one's own prompt, what it continues, and its
    tokens; all ids differ.
    """
    ids = itertools.count(1)
    turns = []
    for number in range(draw(st.integers(1, 7))):
        continues = draw(st.sampled_from([None, *range(number)]))
        prompt = [next(ids) for _ in range(draw(st.integers(1 if continues is None else 0, 3)))]
        turns.append((prompt, continues, [next(ids) for _ in range(draw(st.integers(0, 3)))]))
    return turns


@given(conversations())
def test_every_generated_token_is_trained_once_after_what_it_was_generated_after(tree):
    turns, whole = [], []
    for prompt, continues, generated in tree:
        turn = Turn(
            messages=[],
            prompt_token_ids=prompt,
            continues=continues,
            num_tokens=len(generated),
            reply={},
        )
        turn.weights_version = len(turns)
        turns.append(turn)
        whole.append(((whole[continues] if continues is not None else []) + prompt, generated))
        whole[-1] = whole[-1][0] + generated
    generated = [token for _, _, ids in tree for token in ids]
    values = {
        "prompt_token_ids": tree[0][0],
        "token_ids": generated,
        "logprobs": [-float(token) for token in generated],
    }
    sample = Sample(task_id="t", sample=0, messages=ASK, turns=turns, reward=1.0, **values)
    tokenize = TaskResultTokenizer()
    sequences = tokenize(task(sample), [1.0])
    before = {token: ids[: ids.index(token)] for ids in whole for token in ids}
    versions = {token: number for number, (_, _, ids) in enumerate(tree) for token in ids}
    trained = []
    for one in sequences:
        for place, (token, kept) in enumerate(zip(one.token_ids, one.assistant_mask, strict=True)):
            assert one.token_ids[:place] == before[token]
            assert one.logprobs[place] == -float(token) if kept else math.isnan(one.logprobs[place])
            if kept:
                trained.append(token)
                own = (
                    one.token_versions[place - one.prompt_length]
                    if one.token_versions
                    else one.weights_version
                )
                assert own == versions[token]
    assert sorted(trained) == generated and tokenize.counts.sequences == len(sequences)
    if generated:
        assert math.fsum(one.share for one in sequences) == pytest.approx(1)
        packed = packed_tensors_from_tokenized_results(sequences, seq_len=64, pad_id=0)
        assert sorted(packed.labels[packed.labels != -100].tolist()) == generated


def test_the_last_answer_is_looked_for_in_the_last_turn(tokenizer):
    """For the surprise bonus: an earlier turn may say the same."""
    ids = tokenizer("y", add_special_tokens=False)["input_ids"]
    sample = two_turns(token_ids=ids * 3, metrics={"end": 1})
    assert answer_end(sample, "end", tokenizer) == 3
    sample.turns = None
    assert answer_end(sample, "end", tokenizer) == 1


# The server's token strings against its ids


def with_strings(tokenizer, strings):
    ids = tokenizer("good", add_special_tokens=False)["input_ids"]
    return Sample(
        task_id="t",
        sample=0,
        messages=ASK,
        text="good",
        prompt_token_ids=[1],
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        logprob_tokens=strings,
        reward=1.0,
    )


def test_ids_and_their_logprobs_tokens(tokenizer):
    tokenize = TaskResultTokenizer(tokenizer)
    (one,) = tokenize(task(with_strings(tokenizer, [*"good"])), [1.0])
    assert tokenize.counts.unaligned == 0 and one.logprobs[1:] == [-1.0] * 4
    # Nothing, half a character: not compared.
    (one,) = tokenize(task(with_strings(tokenizer, [*"g", "", "\xc3", "d"])), [1.0])
    assert tokenize.counts.unaligned == 0
    (one,) = tokenize(task(with_strings(tokenizer, [*"goad"])), [1.0])
    assert (
        tokenize.counts.unaligned == 1 and math.isnan(one.logprobs[3]) and one.logprobs[4] == -1.0
    )
    ids = tokenizer("good", add_special_tokens=False)["input_ids"]
    tokenize(task(with_strings(tokenizer, [f"token_id:{i}" for i in ids])), [1.0])
    assert tokenize.counts.unaligned == 1
    with pytest.raises(
        TokenizationError,
        match=r"3 of 4 tokens differ .* token 0 has id \d+, which is 'g', but its logprob is for "
        r"'o'",
    ):
        tokenize(task(with_strings(tokenizer, [*"oodg"])), [1.0])
    with pytest.raises(TokenizationError, match="4 token ids, but 3 token strings of logprobs"):
        tokenize(task(with_strings(tokenizer, [*"goo"])), [1.0])


# Servers without ids


def answered(text, strings=None, *, finish_reason="stop", logprobs=None, messages=ASK, **changes):
    if strings is not None:
        logprobs = [-(k + 1) / 4 for k in range(len(strings))] if logprobs is None else logprobs
        strings = [string.encode().decode("latin-1") for string in strings]
    values = {
        "text": text,
        "finish_reason": finish_reason,
        "logprobs": logprobs,
        "logprob_tokens": strings,
        "reward": 1.0,
    }
    return Sample(task_id="t", sample=0, messages=messages, **(values | changes))


def parts(tokenizer, one):
    """The prompt, and what is trained, as text."""
    trained = [token for token, kept in zip(one.token_ids, one.assistant_mask, strict=True) if kept]
    return tokenizer.decode(one.token_ids[: one.prompt_length]), tokenizer.decode(trained)


@pytest.mark.parametrize(
    ("text", "strings", "unaligned"),
    [
        ("good", [*"good", EOT], 0),
        ("good", [*"good"], 1),  # as OpenAI: nothing for the end of turn
        ("good\n\n", [*"good", "\n", "\n", EOT], 0),  # trailing newlines belong to the answer
        ("good", ["go", "od", EOT], 4),  # other tokens than ours: nothing is guessed
        ("good", ["g", "oo", "d", EOT], 2),
        # A character of two tokens has no log-probability of either.
        ("wörd", ["w", "ö", "rd", EOT], 4),
        ("good", [*"bood", EOT], 5),  # another text: nothing behind the difference is theirs
        ("good", None, 0),  # none were asked for
    ],
)
def test_the_template_makes_the_ids_and_logprobs_are_aligned_or_nan(
    tokenizer, text, strings, unaligned
):
    tokenize = TaskResultTokenizer(tokenizer)
    sample = answered(text, strings)
    (one,) = tokenize(task(sample), [1.0])
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    assert parts(tokenizer, one) == (prompt, text + EOT)
    assert tokenize.counts.unaligned == unaligned
    known = [logprob for logprob in one.logprobs if not math.isnan(logprob)]
    assert set(known) <= set(sample.logprobs or ()) and known == sorted(known, reverse=True)
    if strings is not None:
        assert len(known) == len(one.token_ids) - one.prompt_length - unaligned


def test_logprobs_without_tokens_are_nobodys(tokenizer):
    tokenize = TaskResultTokenizer(tokenizer)
    (one,) = tokenize(task(answered("good", logprobs=[-1.0] * 5)), [1.0])
    assert tokenize.counts.unaligned == 5 and all(map(math.isnan, one.logprobs))


def test_logprobs_that_the_server_did_not_know_are_not_unaligned(tokenizer):
    tokenize = TaskResultTokenizer(tokenizer)
    (one,) = tokenize(
        task(answered("good", [*"good", EOT], logprobs=[-1.0, math.nan, -1.0, -1.0, -1.0])), [1.0]
    )
    assert tokenize.counts.unaligned == 0 and math.isnan(one.logprobs[one.prompt_length + 1])


def test_the_end_of_turn_is_trained_only_where_it_was_sampled(tokenizer):
    (cut,) = TaskResultTokenizer(tokenizer)(task(answered("good", finish_reason="length")), [1.0])
    assert parts(tokenizer, cut)[1] == "good"
    (stopped,) = TaskResultTokenizer(tokenizer, end_of_turn=False)(task(answered("good")), [1.0])
    assert parts(tokenizer, stopped)[1] == "good"


def test_special_tokens_in_a_users_text_are_what_the_server_makes_of_them(tokenizer):
    messages = [{"role": "user", "content": f"say {EOT} now"}]
    (one,) = TaskResultTokenizer(tokenizer)(
        task(answered("good", [*"good", EOT], messages=messages)), [1.0]
    )
    prompt, trained = parts(tokenizer, one)
    assert prompt.count(EOT) == 2 and trained == f"good{EOT}"
    assert one.token_ids[: one.prompt_length].count(tokenizer.eos_token_id) == 2


def test_given_assistant_messages_are_not_trained(tokenizer):
    messages = [*ASK, {"role": "assistant", "content": "few"}, {"role": "user", "content": "shot"}]
    (one,) = TaskResultTokenizer(tokenizer)(task(answered("good", messages=messages)), [1.0])
    prompt, trained = parts(tokenizer, one)
    assert "few" in prompt and trained == f"good{EOT}"


def conversation(tokenizer_keeps=True, **changes):
    """Two turns of a server without ids."""
    turns = [
        Turn(
            messages=[],
            follows=-1,
            reply={"role": "assistant", "content": "<think>\na\n</think>\n\none"},
            finish_reason="stop",
        ),
        Turn(
            messages=[{"role": "user", "content": "more"}],
            follows=0,
            reply={"role": "assistant", "content": "two"},
            finish_reason="stop",
        ),
    ]
    return answered("two", turns=turns, **changes)


def test_several_turns_by_the_template(tokenizer):
    tokenize = TaskResultTokenizer(tokenizer)
    sample = conversation()
    for turn in sample.turns:
        turn.num_tokens = len(turn.reply["content"]) + 1
    strings = [*sample.turns[0].reply["content"], EOT, *"two", EOT]
    sample.logprobs, sample.logprob_tokens = [-float(k) for k in range(len(strings))], strings
    (one,) = tokenize(task(sample), [1.0])
    assert parts(tokenizer, one)[1] == f"<think>\na\n</think>\n\none{EOT}two{EOT}"
    assert [
        p for p, kept in zip(one.logprobs, one.assistant_mask, strict=True) if kept
    ] == sample.logprobs
    assert tokenize.counts.unaligned == 0 and tokenize.counts.sequences == 1


THINKS = (
    "{%- for m in messages -%}{%- set content = m.content -%}"
    "{%- if m.role == 'assistant' and not loop.last and '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def test_thinking_that_the_template_strips_is_trained_where_it_was_written(tokenizer):
    tokenizer.chat_template = THINKS
    first, second = TaskResultTokenizer(tokenizer)(task(conversation()), [1.0])
    assert parts(tokenizer, first)[1] == f"<think>\na\n</think>\n\none{EOT}"
    prompt, trained = parts(tokenizer, second)
    assert "<think>" not in prompt and "one" in prompt and trained == f"two{EOT}"
    assert first.share + second.share == pytest.approx(1)


TOOLS = (
    "{%- if tools -%}{{ 'T:' + tools[0].function.name + '\n' }}{%- endif -%}{%- for m in "
    "messages -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{%- for call in m.tool_calls or [] -%}"
    "{{ '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}{%- "
    "endfor -%}{{ '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@pytest.mark.parametrize("own_tools", [True, False])
def test_tool_calls_by_the_template(tokenizer, own_tools):
    tokenizer.chat_template = TOOLS
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    sample = conversation()
    sample.turns[0].reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    sample.turns[0].finish_reason = "tool_calls"
    sample.turns[1].messages = [{"role": "tool", "tool_call_id": "1", "content": "3"}]
    for turn in sample.turns if own_tools else ():
        turn.tools = tools
    (one,) = TaskResultTokenizer(tokenizer, tools=None if own_tools else tools)(task(sample), [1.0])
    prompt, trained = parts(tokenizer, one)
    assert prompt.startswith("T:add\n") and trained == f'<call>add{{"a": 1}}</call>{EOT}two{EOT}'
    sample.turns[0].finish_reason = "length"  # the end of its turn was never sampled
    (one,) = TaskResultTokenizer(tokenizer, tools=tools)(task(sample), [1.0])
    assert parts(tokenizer, one)[1] == f'<call>add{{"a": 1}}</call>two{EOT}'


def test_a_token_that_would_span_prompt_and_answer(tokenizer):
    """ "\\ng" is one token of this tokenizer, but no model that is sent a prompt with the newline
    can generate it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "Ċg", "oo"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "g"), ("o", "o")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", EOT)])
    merging = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOT)
    merging.chat_template = tokenizer.chat_template
    assert len(merging("\ngoo", add_special_tokens=False)["input_ids"]) == 2
    tokenize = TaskResultTokenizer(merging)
    (one,) = tokenize(task(answered("good", ["g", "oo", "d", EOT])), [1.0])
    assert one.token_ids[one.prompt_length :] == merging.convert_tokens_to_ids(
        ["g", "oo", "d", EOT]
    )
    assert tokenize.counts.unaligned == 0 and one.logprobs[one.prompt_length :] == [
        -0.25,
        -0.5,
        -0.75,
        -1.0,
    ]
    assert (
        one.token_ids[: one.prompt_length]
        == merging.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"]
    )


def test_what_no_template_can_tell(tokenizer):
    with pytest.raises(
        TokenizationError, match="task 't', sample 0: the server removed tool calls from the reply"
    ):
        TaskResultTokenizer(tokenizer)(task(answered("", finish_reason="tool_calls")), [1.0])
    with pytest.raises(
        TokenizationError, match="task 't', sample 0: the reply is empty and was cut off"
    ):
        TaskResultTokenizer(tokenizer)(task(answered("", finish_reason="length")), [1.0])
    sample = conversation()
    sample.turns[1].reply = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
    }
    with pytest.raises(TokenizationError, match=r"task 't', sample 0, turn 1: .*not a JSON object"):
        TaskResultTokenizer(tokenizer)(task(sample), [1.0])
    with pytest.raises(
        TokenizationError, match="or give the model's tokenizer, and ttrl uses its chat template"
    ):
        TaskResultTokenizer()(task(answered("good")), [1.0])

"""Log-probabilities by token strings: lost bytes, and strings of the vocabulary."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.data.logprob_alignment import align, check_strings

LOST = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and tokens for 是, "ok" and " ok"; 😊 is four tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("æ", "ĺ"), ("æĺ", "¯"), ("o", "k"), ("Ġ", "ok")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(first + second for first, second in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def aligned(tokenizer, text, strings):
    """The place of the server's token, from 1, for each of our tokens; None where it is NaN."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    logprobs = [-float(number) for number in range(1, len(strings) + 1)]
    said = [string.encode().decode("latin-1") for string in strings]
    values, unaligned = align(tokenizer, [], ids, logprobs, said)
    assert len(values) == len(ids) and unaligned == sum(map(math.isnan, values))
    return [None if math.isnan(value) else round(-value) for value in values]


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        # Ollama gives U+FFFD for each token of an emoji: these are lost, and no others.
        ("a😊b", ["a", *LOST * 4, "b"], [1, None, None, None, None, 6]),
        ("😊", [*LOST * 4], [None] * 4),
        ("😊😊b", [*LOST * 8, "b"], [*[None] * 8, 9]),
        # A token may hold more than one byte of it, or a whole character as well.
        ("a😊b", ["a", LOST, LOST, "b"], [1, *[None] * 4, 4]),
        ("a😊b", ["a", "😊", "b"], [1, *[None] * 4, 3]),
        ("a😊b", ["a" + LOST, LOST, "b"], [*[None] * 5, 3]),
        # 是 stands twice behind the emoji: the second ends the text, so both are known.
        ("😊是是", [*LOST * 4, "是", "是"], [None] * 4 + [5, 6]),
        # Here nothing tells how the lost bytes are shared out, and the text may end anywhere.
        ("😊是是是是", [*LOST * 4, "是"], [None] * 8),
        # Another text behind lost bytes is another text.
        ("a😊b", ["a", *LOST * 4, "c"], [1, *[None] * 5]),
        ("a😊b", ["a", *LOST * 5, "b"], [1, *[None] * 5]),
        # U+FFFD that the model wrote itself, in a server's text: as lost as its token's bytes.
        ("a\ufffdb", ["a", LOST, "b"], [1, None, None, None, 3]),
    ],
)
def test_lost_bytes_cost_their_own_tokens_alone(tokenizer, text, strings, expected):
    assert aligned(tokenizer, text, strings) == expected


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("是", ["æĺ¯"], [1]),
        ("是 ok", ["æĺ¯", "Ġok"], [1, 2]),
        ("ok", ["ok"], [1]),
        # The parts of an emoji are known by their ids.
        ("是😊 ok", ["æĺ¯", "ð", "Ł", "ĺ", "Ĭ", "Ġok"], [1, 2, 3, 4, 5, 6]),
        # Other tokens of the same text: those of the same bytes.
        ("是 ok", ["æĺ¯", "Ġ", "ok"], [1, None]),
        ("是 ok是", ["æĺ¯", "Ġ", "ok", "æĺ¯"], [1, None, 4]),
        # Not all strings are of the vocabulary: then they are read as bytes.
        ("是 ok", ["是", " ok"], [1, 2]),
    ],
)
def test_strings_of_the_vocabulary_are_known_by_their_ids(tokenizer, text, strings, expected):
    assert aligned(tokenizer, text, strings) == expected


def test_ids_agree_with_strings_of_the_vocabulary(tokenizer):
    ids = tokenizer("是 ok😊", add_special_tokens=False)["input_ids"]
    said = ["æĺ¯", "Ġok", "ð", "Ł", "ĺ", "Ĭ"]
    strings = [string.encode().decode("latin-1") for string in said]
    logprobs = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert check_strings("here", tokenizer, ids, logprobs, strings) == (logprobs, 0)
    strings[1] = "x"
    values, wrong = check_strings("here", tokenizer, ids, logprobs, strings)
    assert wrong == 1 and math.isnan(values[1]) and values[:1] + values[2:] == [-1, -3, -4, -5, -6]


PIECES = ["a", " ok", "是", "é", "😊", "👍🏽", "\n", "<|end|>"]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.randoms(use_true_random=False))
def test_nothing_is_given_to_another_token(tokenizer, pieces, draw: random.Random):
    """Whatever a server loses: a log-probability that is given belongs to the very token."""
    text = "".join(pieces)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    strings = []
    for token in ids:
        string = tokenizer.decode([token])
        is_lost = LOST in string
        strings.append(LOST if is_lost else string)
    found = aligned(tokenizer, text, strings)
    for number, (place, string) in enumerate(zip(found, strings, strict=True), 1):
        assert place in (None, number)
        if string == LOST:
            assert place is None
        elif string.isascii():
            assert place == number


def test_a_long_text_of_lost_bytes_takes_no_long_time(tokenizer):
    count = 3000
    found = aligned(tokenizer, "😊" * count + "ok", [*LOST * 4 * count, "ok"])
    assert found == [*[None] * 4 * count, 4 * count + 1]

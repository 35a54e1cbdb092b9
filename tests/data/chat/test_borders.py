"""From characters to tokens: borders that tokens span, tokenizers without offsets, answers as a
server gave them.
"""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ttrl.data.chat.templates import tokenize_chat, tokenize_completion
from ttrl.errors import TokenizationError

Q1, Q2 = {"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}
A1, A2 = {"role": "assistant", "content": "First."}, {"role": "assistant", "content": "Second."}


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Slow:
    """A tokenizer without offsets, around a fast one."""

    is_fast = False

    def __init__(self, fast):
        self._fast = fast

    def __getattr__(self, name):
        return getattr(self._fast, name)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow])
def test_a_token_that_spans_the_border_is_taken_apart(tokenizer_of, trained, kind):
    tokenizer = kind(tokenizer_of("plain", merges=["\nF", "Fi"]))
    prompt = tokenizer.apply_chat_template([Q1], add_generation_prompt=True, tokenize=False)
    joined = ids(tokenizer, prompt + "First.<|im_end|>")
    assert joined[: len(ids(tokenizer, prompt))] != ids(tokenizer, prompt)  # "\nF" is one token
    chat = tokenize_chat(tokenizer, [Q1, A1, Q2, A2])
    assert chat.splits == 1
    assert trained(tokenizer, chat) == {1: "First.<|im_end|>", 3: "Second.<|im_end|>"}
    start, end = chat.turns[0].start, chat.turns[0].end
    assert chat.token_ids[:start] == ids(tokenizer, prompt)
    # As the model may well generate it: "Fi" is one.
    assert chat.token_ids[start:end] == ids(tokenizer, "First.<|im_end|>")
    assert tokenizer.decode(chat.token_ids) == chat.text


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow])
def test_a_special_token_that_takes_blanks_along(tokenizer_of, trained, kind):
    """As Phi-3's: "<|im_start|>assistant" and "<|im_end|>" take a newline behind them, also an
    answer's first one.
    """
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt }}"
    )
    tokenizer = kind(tokenizer_of(template, rstrip=True))
    chat = tokenize_chat(tokenizer, [Q1, {"role": "assistant", "content": "\n First."}])
    assert chat.splits == 1
    assert trained(tokenizer, chat) == {1: "\n First.<|im_end|>"}
    assert tokenize_chat(tokenizer, [Q1, A1]).splits == 0


def test_characters_of_several_tokens(tokenizer_of, trained):
    """One token per byte: no border falls into a character."""
    tokenizer = tokenizer_of("instructs")
    messages = [
        {"role": "user", "content": "\U0001f600"},
        {"role": "assistant", "content": "\U0001f600é\u200d\u4e16"},
    ]
    chat = tokenize_chat(tokenizer, messages)
    assert (
        trained(tokenizer, chat) == {1: "\U0001f600é\u200d\u4e16</s>"}
        and chat.turns[0].end - chat.turns[0].start == 13
    )


def metaspace(scheme, merges=()):
    vocabulary = {
        piece: n for n, piece in enumerate(["<unk>", "<s>", "</s>", "▁", *"abcd[]/INST", *merges])
    }
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[(m[:-1], m[-1]) for m in merges], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + "
        "m['content'] + '[/INST]' }}"
        "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
    )
    return tokenizer


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_blanks_that_a_tokenizer_puts_before_texts(scheme, kind):
    """Metaspace tokenizers may put a blank in front of whatever they are given, also of an answer
    that is tokenized alone.
    """
    tokenizer = kind(metaspace(scheme))
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}] * 2
    chat = tokenize_chat(tokenizer, messages)
    whole = ids(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))
    assert chat.token_ids == whole and chat.splits == 0
    marked = [token for token, mark in zip(whole, chat.assistant_mask, strict=True) if mark]
    assert tokenizer.convert_ids_to_tokens(marked) == ["c", "d", "</s>"] * 2


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_split_does_not_bring_in_a_blank(scheme):
    """The answer's first letter is one token with the prompt's last: the answer is tokenized apart,
    behind a special token where that is the only way to have no blank."""
    tokenizer = metaspace(scheme, merges=["]c"])
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    if scheme == "always":
        with pytest.raises(
            TokenizationError, match=r"spans the border .* its two parts would be other tokens"
        ):
            tokenize_chat(tokenizer, messages)
        return
    chat = tokenize_chat(tokenizer, messages)
    assert chat.splits == 1
    marked = [
        token for token, mark in zip(chat.token_ids, chat.assistant_mask, strict=True) if mark
    ]
    assert tokenizer.convert_ids_to_tokens(marked) == ["c", "d", "</s>"]


def test_an_end_of_turn_that_is_not_one_token(tokenizer_of):
    tokenizer = tokenizer_of("plain")
    with pytest.raises(TokenizationError, match=r"'<\|im_end\|>\\n' is not a single token"):
        tokenize_chat(tokenizer, [Q1, A1], stop_tokens=["<|im_end|>\n"])


@pytest.mark.parametrize(
    "template", ["plain", "thinks", "opens", "skips", "trims", "instructs", "two ends", "parts"]
)
@pytest.mark.parametrize("text", ["First.", " so</think>\n\nFirst.\n", "<think>x</think>"])
def test_a_completion_as_it_came(tokenizer_of, template, text):
    """Nothing is stripped or rendered again, whatever the template would do to it."""
    tokenizer = tokenizer_of(template)
    asked = [Q1 | {"content": [{"type": "text", "text": "One?"}]}] if template == "parts" else [Q1]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    chat = tokenize_completion(tokenizer, [Q1], text, ended=True)
    end = "</s>" if template == "instructs" else "<|im_end|>"
    assert chat.text == prompt + text + end and tokenizer.decode(chat.token_ids) == chat.text
    assert chat.token_ids[: chat.turns[0].start] == ids(tokenizer, prompt)
    assert tokenizer.decode(chat.token_ids[chat.turns[0].start :]) == text + end
    cut = tokenize_completion(tokenizer, [Q1], text, ended=False)
    assert cut.token_ids == chat.token_ids[:-1] and cut.assistant_mask == chat.assistant_mask[:-1]


def test_completions_without_tokens_or_a_known_end(tokenizer_of):
    assert sum(tokenize_completion(tokenizer_of("plain"), [Q1], "", ended=True).assistant_mask) == 1
    with pytest.raises(TokenizationError, match="the reply is empty and was cut off"):
        tokenize_completion(tokenizer_of("plain"), [Q1], "", ended=False)
    with pytest.raises(TokenizationError, match="set stop_tokens to the model's own"):
        tokenize_completion(tokenizer_of("open ends"), [Q1], "x", ended=True)
    chat = tokenize_completion(
        tokenizer_of("open ends"), [Q1], "x", ended=True, stop_tokens=["<|user|>"]
    )
    assert chat.text == "<|user|>One?<|assistant|>x<|user|>"

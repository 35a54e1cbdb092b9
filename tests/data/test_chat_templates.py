"""Supervised examples: what is trained is the answer and its end-of-turn token, and a template that breaks that is an error."""

import math

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ttrl.data.chat_templates import chat_tokens
from ttrl.data.packing import packed_tensors_from_tokenized_results
from ttrl.errors import ModelFolderError, TokenizationError

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Ünd hi!"},
]


def test_the_answer_and_its_end_of_turn_token_are_trained(tokenizer):
    result = chat_tokens(tokenizer, MESSAGES)
    trained = [token for token, is_trained in zip(result.token_ids, result.assistant_mask) if is_trained]
    assert tokenizer.decode(trained) == "Ünd hi!<|im_end|>"
    prompt = [token for token, is_trained in zip(result.token_ids, result.assistant_mask) if not is_trained]
    assert prompt == tokenizer.apply_chat_template(MESSAGES[:-1], add_generation_prompt=True, return_dict=False)
    assert result.prompt_length == len(prompt)
    # the whole is a beginning of what the template renders: only the newline behind the end of the turn is missing
    whole = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert whole[: len(result.token_ids)] == result.token_ids
    assert tokenizer.decode(whole[len(result.token_ids) :]) == "\n"
    assert all(math.isnan(logprob) for logprob in result.logprobs) and result.advantage == 1.0
    packed = packed_tensors_from_tokenized_results([result], seq_len=256, pad_id=0)
    assert packed.labels[packed.labels >= 0].tolist() == trained


def test_an_earlier_turn_of_the_assistant_is_not_trained(tokenizer):
    messages = [*MESSAGES, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "ok"}]
    result = chat_tokens(tokenizer, messages)
    assert tokenizer.decode([t for t, m in zip(result.token_ids, result.assistant_mask) if m]) == "ok<|im_end|>"


def test_an_empty_answer_trains_the_end_of_turn_alone(tokenizer):
    result = chat_tokens(tokenizer, [*MESSAGES[:-1], {"role": "assistant", "content": ""}])
    assert sum(result.assistant_mask) == 1 and result.token_ids[-1] == tokenizer.eos_token_id


def test_no_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ModelFolderError, match="no chat template; put a chat_template"):
        chat_tokens(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{%- if add_generation_prompt -%}", "{%- if false -%}", "changes the answer 'Ünd hi!' to '<|im_start|>"),
        ("message['content']", "message['content'] | upper", "changes the answer 'Ünd hi!'"),
        ("message['content']", "message['content'] | replace('Ünd ', '')", "changes the answer"),
        ("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>'", "does not begin so"),
        ("'<|im_end|>'", "''", "end-of-turn token"),
        ("{%- for message in messages -%}", "{{ raise_exception('no system here') }}{%- for message in messages -%}", "refuses"),
    ],
)
def test_templates_that_would_give_a_wrong_mask_are_errors(tokenizer, old, new, message):
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    with pytest.raises(TokenizationError, match=f"^example: .*{message}"):
        chat_tokens(tokenizer, MESSAGES)


def test_an_empty_answer_needs_a_generation_prompt(tokenizer):
    """Otherwise the header that the template puts before every answer would be taken for the end of the turn."""
    tokenizer.chat_template = tokenizer.chat_template.replace("{%- if add_generation_prompt -%}", "{%- if false -%}")
    with pytest.raises(TokenizationError, match="nothing marks it"):
        chat_tokens(tokenizer, [*MESSAGES[:-1], {"role": "assistant", "content": ""}])


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_nothing_is_trained_that_the_template_did_not_render(scheme):
    """Metaspace tokenizers may put a space in front of whatever they are given, also of an answer that is tokenized alone.

    The template is of Mistral's kind: the answer follows the prompt without a header, whether or not one is asked for.
    """
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "<s>", "</s>", "▁", *"abcd[]/INST"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
        "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    result = chat_tokens(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert result.token_ids == whole
    trained = [token for token, mask in zip(whole, result.assistant_mask, strict=True) if mask]
    assert tokenizer.convert_ids_to_tokens(trained) == ["c", "d", "</s>"]


@pytest.mark.parametrize("messages", [[], MESSAGES[:-1], [*MESSAGES[:-1], {"role": "assistant", "content": None}]])
def test_a_conversation_must_end_with_an_answer(tokenizer, messages):
    with pytest.raises(TokenizationError, match="the last message must be the assistant's and have text"):
        chat_tokens(tokenizer, messages)

"""Make a tiny random model in Hugging Face layout: for the quickstart, for tests, and for trying
ttrl without a hub.

Qwen2-shaped, with a tokenizer of one token per byte (a byte-level BPE without merges, loading the
same through every tokenizer class) and a chat template of one special token per role.
"""

from pathlib import Path

from ttrl.system.files import atomic_folder

_ROLES = ("system", "user", "assistant")
_END = "<|end|>"
_PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 512,
    tied: bool = False,
) -> Path:
    """Write a randomly initialised model and its tokenizer to `folder`, atomically; returns the
    folder. `width` is the hidden size, `context` the longest sequence in tokens. The weights depend
    only on `seed`.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in (_PAD, _END, *(f"<|{role}|>" for role in _ROLES))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    fast.chat_template = CHAT_TEMPLATE

    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    disable_progress_bar()  # a bar for one small file says nothing
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        fast.save_pretrained(temporary)
    return Path(folder)

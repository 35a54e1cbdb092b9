"""Random models of published shapes, made on the spot, with tokenizers of their vocabulary's size.

The shapes are those of ttrl/costs/architectures.json; the weights are random, in bf16 on a GPU as
such models are published. The tokenizer is a byte-level BPE: 256 bytes, all pairs of bytes, then
triples until only the special tokens are missing. So every id that a random model samples is a
token, and text of any kind can be encoded. Chat template and special tokens are those of
`ttrl.tiny_model`.
"""

import argparse
import itertools
import json
from pathlib import Path

import check_memory
from check_memory import Case

from ttrl.tiny_model import CHAT_TEMPLATE

QWEN_1_5B = check_memory.ARCHITECTURES["qwen2.5_1.5b"]
QWEN_7B = check_memory.ARCHITECTURES["qwen2.5_7b"]
TINY = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
"""transformers gives Qwen2's tokenizers the first one, behind the vocabulary unless it is there."""
BYTES = 256


def random_model(folder: Path, shape: dict, device: str) -> Path:
    """Return the folder of a random model with its tokenizer; make it if it is not there."""
    made = folder / "model"
    if (made / "tokenizer.json").is_file():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"pad_token_id": shape["vocab_size"] - 5, "eos_token_id": shape["vocab_size"] - 4}
    shape = {"tie_word_embeddings": False} | shape | ids | {"bos_token_id": None}
    check_memory.make_model(Case(shape), folder, device)
    save_tokenizer(made, shape["vocab_size"], shape["max_position_embeddings"])
    return made


def save_tokenizer(folder: Path, size: int, context: int) -> None:
    """Write a tokenizer of `size` tokens, of which the last five are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = byte_pairs(alphabet, size - len(SPECIAL))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == size
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", type=json.loads, help="values of config.json")
    parser.add_argument("device", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    print(random_model(arguments.folder, arguments.shape, arguments.device))


def byte_pairs(alphabet: list[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary of so many tokens over an alphabet, and the merges that make them."""
    assert len(alphabet) == BYTES <= size
    pairs = list(itertools.product(alphabet, repeat=2))
    triples = ((a + b, c) for (a, b), c in itertools.product(pairs, alphabet))
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - BYTES))
    tokens = [*alphabet, *(first + second for first, second in merges)]
    return {token: number for number, token in enumerate(tokens)}, merges


if __name__ == "__main__":
    main()

"""Write a checkpoint's tokenizer into a GGUF file.

llama.cpp knows tokenizers by names: a kind ("gpt2": byte-level BPE; "llama": SentencePiece's BPE),
and for the first a rule for splitting texts before merging. The rule is read from tokenizer.json
itself, by its regular expressions. A tokenizer with another rule is refused: it would split some
texts in another way, unnoticed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ttrl.data.chat.generation_tags import without_generation_tags
from ttrl.errors import ModelFolderError, describe
from ttrl.system.files import read_object

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[tuple[tuple[str, ...], bool], str] = {
    (("bytes",), False): "gpt-2",
    (("digits", "bytes"), False): "smollm",
    ((_WORDS + r"\p{N}" + _OTHERS,), False): "qwen2",
    ((_WORDS + r"\p{N}{1,3}" + _OTHERS,), True): "llama-bpe",
    ((_TEKKEN,), True): "tekken",
}
"""llama.cpp's names, by the steps of a pre-tokenizer: regular expressions, "digits" (each alone),
"bytes" (GPT-2's own expression); and by `ignore_merges`."""
_SPACE = "▁"
_NO_MERGE = "[PAD] [PAD]"
"""A merge without effect: llama.cpp refuses files without any, and no merge makes its parts."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, in llama.cpp's terms."""

    model: str
    """"gpt2" or "llama"."""
    split: str
    tokens: Sequence[str]
    kinds: Sequence[TokenType]
    scores: Sequence[float] | None
    merges: Sequence[str] | None
    special: Mapping[str, int]
    """Ids of "bos", "eos", "eot", "unk" and "pad", as far as there are any."""
    starts_with_bos: bool
    ends_with_eos: bool
    space_first: bool
    chat_template: str | None
    stops: tuple[str, ...]
    """The end tokens of a reply."""

    def add_to(self, to: GGUFWriter) -> None:
        """Write it to a file."""
        to.add_tokenizer_model(self.model)
        to.add_tokenizer_pre(self.split)
        to.add_token_list(self.tokens)
        to.add_token_types(self.kinds)
        if self.scores is not None:
            to.add_token_scores(self.scores)
        if self.merges is not None:
            to.add_token_merges(self.merges or [_NO_MERGE])
        for name, number in self.special.items():
            getattr(to, f"add_{name}_token_id")(number)
        to.add_add_bos_token(self.starts_with_bos)
        to.add_add_eos_token(self.ends_with_eos)
        to.add_add_space_prefix(self.space_first)
        if self.chat_template is not None:
            to.add_chat_template(self.chat_template)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder. Raises ModelFolderError for missing and damaged
    files.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # The library raises anything for damaged files.
    except Exception as error:
        raise ModelFolderError(
            f"the tokenizer of {folder} cannot be loaded ({describe(error)}); copy tokenizer.json, "
            "tokenizer_config.json and chat_template.jinja again from its model"
        ) from error


def vocabulary(folder: Path, rows: int) -> Vocabulary:
    """Return the vocabulary of a model folder. rows: of the embeddings; rows without a token get
    a placeholder. Raises ModelFolderError.
    """
    path = folder / "tokenizer.json"
    try:
        content = read_object(path)
        fast = Tokenizer.from_file(str(path))
    # The library raises plain exceptions.
    except Exception as error:
        raise ModelFolderError(
            f"{path} cannot be read ({error}); a GGUF file needs a tokenizer.json: save the "
            "tokenizer with transformers' save_pretrained"
        ) from error
    model = content["model"]
    if model.get("type") != "BPE":
        raise ModelFolderError(
            f"{path}: a tokenizer of the type {model.get('type')!r}; only BPE goes into GGUF files"
        )
    if not model["vocab"]:
        raise ModelFolderError(f"{path} has no tokens; copy it again from the model")
    if len(fast.get_vocab()) > rows:
        raise ModelFolderError(
            f"{path} has {len(fast.get_vocab()):,} tokens, but the model {rows:,} embeddings"
        )
    by_sentence_pieces = bool(model.get("byte_fallback"))
    merges = [_merge(pair) for pair in model["merges"]]
    known = load_tokenizer(folder)
    tokens, kinds = _tokens(content, known, rows, by_sentence_pieces)
    kind = "llama"
    split = "default"
    scores: list[float] | None = None
    joined: list[str] | None = None
    if by_sentence_pieces:
        scores = _scores(tokens, merges)
    else:
        kind = "gpt2"
        split = _split(content, path)
        joined = [" ".join(pair) for pair in merges]
    plain, whole = (fast.encode("a", add_special_tokens=added) for added in (False, True))
    stops = [number for number in _stops(folder, known) if number < rows]
    special = {
        name: getattr(known, f"{name}_token_id")
        for name in ("bos", "eos", "unk", "pad")
        if getattr(known, f"{name}_token_id", None) is not None
    }
    others = [number for number in stops if number != special.get("eos")]
    if others:
        special["eot"] = others[0]
    return Vocabulary(
        model=kind,
        split=split,
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        merges=joined,
        special=special,
        starts_with_bos=whole.ids[:1] != plain.ids[:1],
        ends_with_eos=whole.ids[-1:] != plain.ids[-1:],
        space_first=plain.tokens[0].startswith(_SPACE),
        chat_template=_template(known),
        stops=tuple(tokens[number] for number in stops),
    )


def _merge(pair: Any) -> tuple[str, str]:
    """Return a merge's two parts: older files write them as one text."""
    first, second = pair.split(" ", 1) if isinstance(pair, str) else pair
    return first, second


def _split(content: Mapping[str, Any], path: Path) -> str:
    """Return llama.cpp's name for the way of splitting. Raises ModelFolderError."""
    normalizer = content.get("normalizer") or {}
    # llama.cpp does not normalise, as if each text were in this form, as nearly all are.
    if normalizer.get("type", "NFC") != "NFC":
        raise ModelFolderError(
            f"{path}: the normalizer {normalizer['type']!r}; llama.cpp's byte-level BPE has none"
        )
    if not content["model"]["merges"]:
        return "gpt-2"  # each byte is a token, however the text is split
    steps = tuple(_steps(content.get("pre_tokenizer") or {}))
    key = (steps, bool(content["model"].get("ignore_merges")))
    if key not in _SPLITS:
        raise ModelFolderError(
            f"{path}: llama.cpp has no name, known to ttrl, for splitting texts like this: "
            f"{' → '.join(steps) or 'not at all'}{', whole words first' * key[1]}; known are "
            f"{', '.join(_SPLITS.values())}. llama.cpp's own converter may know it"
        )
    return _SPLITS[key]


def _steps(pre: Mapping[str, Any]) -> list[str]:
    kind = pre.get("type")
    if kind == "Sequence":
        return [step for one in pre["pretokenizers"] for step in _steps(one)]
    if kind == "Split" and pre.get("behavior") == "Isolated" and not pre.get("invert"):
        return [str(pre["pattern"].get("Regex"))]
    if kind == "Digits" and pre.get("individual_digits"):
        return ["digits"]
    if kind == "ByteLevel" and not pre.get("add_prefix_space"):
        return ["bytes"] if pre.get("use_regex", True) else []
    return [str(dict(pre))]


def _tokens(
    content: Mapping[str, Any], known: Any, rows: int, by_sentence_pieces: bool
) -> tuple[list[str], list[TokenType]]:
    """Return each row's token and kind."""
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [TokenType.UNUSED] * rows
    for token, number in content["model"]["vocab"].items():
        tokens[number] = token
        kinds[number] = TokenType.NORMAL
        if by_sentence_pieces and _is_byte(token):
            kinds[number] = TokenType.BYTE
    for one in content.get("added_tokens") or []:
        tokens[one["id"]] = one["content"]
        kinds[one["id"]] = TokenType.USER_DEFINED
        if one["special"]:
            kinds[one["id"]] = TokenType.CONTROL
    if by_sentence_pieces and known.unk_token_id is not None:
        kinds[known.unk_token_id] = TokenType.UNKNOWN
    return tokens, kinds


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return each token's score: llama.cpp merges the pair with the highest one first, as the
    tokenizer the pair with the earliest merge.
    """
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    return [-float(ranks.get(token, 0)) for token in tokens]


def _stops(folder: Path, known: Any) -> list[int]:
    """Return the ids of the end tokens of a reply, the tokenizer's own first."""
    file = folder / "generation_config.json"
    found = [known.eos_token_id]
    if file.is_file():
        try:
            ends: Any = read_object(file).get("eos_token_id")
        except ValueError as error:
            raise ModelFolderError(
                f"{file} is damaged ({error}); copy it again from the model, or remove it"
            ) from error
        if not isinstance(ends, list):
            ends = [ends]
        found += ends
    return list(dict.fromkeys(number for number in found if number is not None))


def _template(known: Any) -> str | None:
    """Return the chat template, without its tags for training."""
    template = known.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        return None
    return without_generation_tags(template)

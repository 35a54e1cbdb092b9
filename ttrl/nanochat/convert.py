"""Convert nanochat's own checkpoints to a folder in Hugging Face layout.

    ttrl models convert nanochat ~/.cache/nanochat/chatsft_checkpoints/d20 --out models/nanochat-d20

Reads `model_NNNNNN.pt`, `meta_NNNNNN.json` and `tokenizer.pkl` as nanochat writes them in 2026. No
object of the files is built: torch loads weights alone (`weights_only`), and of the pickled
tokenizer its ranks, pattern and special tokens are taken, by an unpickler with one class.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from ttrl.errors import UserError
from ttrl.nanochat.modeling import ARCHITECTURE, Nanochat2026ForCausalLM, NanochatConfig
from ttrl.system.files import read_object
from ttrl.text import short

BOS = "<|bos|>"
END_OF_TURN = "<|assistant_end|>"
_LAYER = {
    "attn.c_q.weight": "attn.q_proj.weight",
    "attn.c_k.weight": "attn.k_proj.weight",
    "attn.c_v.weight": "attn.v_proj.weight",
    "attn.c_proj.weight": "attn.o_proj.weight",
    "attn.ve_gate.weight": "attn.value_gate.weight",
    "mlp.c_fc.weight": "mlp.up_proj.weight",
    "mlp.c_proj.weight": "mlp.down_proj.weight",
}
_ELSEWHERE = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "smear_gate.weight": "model.layers.0.gate.weight",
    "smear_lambda": "model.layers.0.amount",
    "backout_lambda": "model.backout.amount",
}
_SCALES = {"resid_lambdas": "residual_scale", "x0_lambdas": "start_scale"}
"""Vectors of one number for each layer."""
_SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
_LARGEST_SIZE = 10_000_000
_LARGEST_PICKLE = 2**26
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = message['content'] + '\\n\\n' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant_start|>' + message['content'] + '<|assistant_end|>' -}}
{%- else -%}
{{- '<|user_start|>' + ns.system + message['content'] + '<|user_end|>' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant_start|>' -}}
{%- endif -%}
"""
"""The output of nanochat's render_conversation: a system message stands before the first user's."""


def convert(source: str | Path, out: str | Path, tokenizer: str | Path | None = None) -> Path:
    """Write a model folder for every recipe and vLLM, and return it.

    source: a folder of checkpoints (its last step is taken), or one `model_NNNNNN.pt`. tokenizer:
    the folder of `tokenizer.pkl`; None: nanochat's own place, next to the folder of all
    checkpoints. Weights are stored in float32. Raises UserError for missing files, or files not of
    a nanochat of 2026.
    """
    weights, meta = _files(Path(source).expanduser())
    settings = _settings(meta)
    pickled = _tokenizer_file(weights, tokenizer)
    own_tokenizer = read_tokenizer(pickled)
    vocabulary = settings["vocab_size"]
    if len(own_tokenizer) != vocabulary:
        raise UserError(
            f"{pickled} has {len(own_tokenizer)} tokens, but {meta} says {vocabulary}; give the "
            "model's own tokenizer"
        )
    stored = _stored(weights)
    config = _config(settings, stored, own_tokenizer, weights)
    with torch.device("meta"):
        model = Nanochat2026ForCausalLM(config)
    tensors = _renamed(stored, vocabulary, weights)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _check(expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, weights)
    model.load_state_dict(tensors, assign=True)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made a folder: {error.strerror}; choose another one (--out)"
        ) from error
    model.save_pretrained(folder)
    own_tokenizer.save_pretrained(folder)
    return folder


def _files(source: Path) -> tuple[Path, Path]:
    """Return the weights and their metadata."""
    if source.is_dir():
        found = sorted(source.glob("model_*.pt"))
        if not found:
            raise UserError(
                f"{source} holds no model_NNNNNN.pt; give a folder such as chatsft_checkpoints/d20"
            )
        weights = found[-1]
    else:
        weights = source
    step = re.fullmatch(r"model_(\d+)\.pt", weights.name)
    if step is None or not weights.is_file():
        raise UserError(
            f"{weights} is not a checkpoint of nanochat; their names are model_NNNNNN.pt"
        )
    meta = weights.with_name(f"meta_{step[1]}.json")
    if not meta.is_file():
        raise UserError(f"{meta} is missing; nanochat writes it next to {weights.name}")
    return weights, meta


def _settings(meta: Path) -> dict[str, Any]:
    """Return nanochat's GPTConfig."""
    try:
        found = read_object(meta)["model_config"]
        sizes = {name: found[name] for name in _SIZES}
        pattern = str(found.get("window_pattern", "L")).upper()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{meta}: its model_config is not nanochat's ({type(error).__name__}: {error})"
        ) from error
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= _LARGEST_SIZE:
            raise UserError(
                f"{meta}: {name} is {short(size, 80)}; nanochat's are whole numbers from 1 to "
                f"{_LARGEST_SIZE:,}"
            )
    if sizes["n_embd"] % (2 * sizes["n_head"]):
        raise UserError(
            f"{meta}: n_embd is {sizes['n_embd']} and n_head {sizes['n_head']}; each head needs an "
            "even number of dimensions"
        )
    if not pattern or set(pattern) - set("SL"):
        raise UserError(f"{meta}: window_pattern is {pattern!r}; nanochat's consist of S and L")
    if sizes["n_kv_head"] != sizes["n_head"]:
        raise UserError(
            f"{meta}: n_kv_head is {sizes['n_kv_head']} and n_head {sizes['n_head']}; ttrl does "
            "not convert this model: the smear is computed by attention with equal numbers of key "
            "and query heads"
        )
    return {**sizes, "window_pattern": pattern}


def _tokenizer_file(weights: Path, given: str | Path | None) -> Path:
    if given is not None:
        folders = [Path(given).expanduser()]
    else:
        folders = [weights.parents[n] / "tokenizer" for n in (0, 1, 2)]
    for folder in folders:
        if folder.is_file():
            file = folder
        else:
            file = folder / "tokenizer.pkl"
        if file.is_file():
            return file
    raise UserError(
        f"no tokenizer.pkl in {' or '.join(map(str, folders))}; give its folder with --tokenizer"
    )


class _Encoding:
    """Stands for tiktoken's Encoding and its plain-data state."""

    def __init__(self, *_: Any) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = dict(state)


class _PlainUnpickler(pickle.Unpickler):
    """Builds nothing but an `_Encoding`, numbers, bytes, text, lists and dicts."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _Encoding
        raise UserError(
            f"a tokenizer that would build {module}.{name}; ttrl reads only a pickled tiktoken "
            "Encoding"
        )


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in nanochat's `tokenizer.pkl`, with a chat template. Runs nothing of the
    file. Raises UserError if the file describes none."""
    if file.stat().st_size > _LARGEST_PICKLE:
        raise UserError(
            f"{file} has {file.stat().st_size / 1e6:.0f} MB; nanochat's tokenizers have less "
            "than one"
        )
    try:
        with file.open("rb") as stream:
            state = _PlainUnpickler(stream).load().state
        ranks = {bytes(token): int(rank) for token, rank in state["mergeable_ranks"].items()}
        special = {str(token): int(rank) for token, rank in state["special_tokens"].items()}
        pattern = str(state["pat_str"])
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(
            f"{file} is not a tokenizer of nanochat ({type(error).__name__}: {error})"
        ) from error
    ordered = sorted(special, key=lambda token: special[token])
    if sorted(ranks.values()) != list(range(len(ranks))) or [
        special[token] for token in ordered
    ] != [len(ranks) + number for number in range(len(special))]:
        raise UserError(f"{file}: tokens are not numbered from 0, special ones last")
    missing = {
        BOS,
        END_OF_TURN,
        "<|user_start|>",
        "<|user_end|>",
        "<|assistant_start|>",
    } - special.keys()
    if missing:
        raise UserError(
            f"{file}: no special token {', '.join(sorted(missing))}; check that it is a tokenizer "
            "of nanochat"
        )
    made = _Converter(ranks, pattern, ordered).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BOS, eos_token=END_OF_TURN, pad_token=BOS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class _Converter(TikTokenConverter):
    """Takes ranks instead of a file."""

    def __init__(self, ranks: dict[bytes, int], pattern: str, special: list[str]) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            pattern=pattern, extra_special_tokens=special
        )
        self._ranks = ranks

    def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:  # type: ignore[override]
        return self._ranks


def _stored(weights: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise UserError(f"{weights} cannot be read as a file of weights: {error}") from error
    if not isinstance(found, Mapping) or not all(map(_is_array, found.values())):
        raise UserError(f"{weights}: no dict of arrays of numbers, as nanochat writes it")
    return {str(name).removeprefix("_orig_mod."): tensor for name, tensor in found.items()}


def _is_array(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.is_floating_point() and value.dim() > 0


def _config(
    settings: Mapping[str, Any],
    stored: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    weights: Path,
) -> NanochatConfig:
    layers = settings["n_layer"]
    there = {name.split(".")[2] for name in stored if name.startswith("transformer.h.")}
    if len(there) != layers:
        raise UserError(f"{weights} has {len(there)} layers, but n_layer of its config is {layers}")
    context = settings["sequence_len"]
    pattern = settings["window_pattern"]
    short = -(-context // 4 // 128) * 128 + 1  # nanochat counts the tokens before a token's own
    windows = [short if pattern[number % len(pattern)] == "S" else None for number in range(layers)]
    windows[-1] = None
    given = re.findall(r"^value_embeds\.(\d{1,9})\.weight$", "\n".join(stored), re.MULTILINE)
    return NanochatConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["n_embd"],
        num_hidden_layers=layers + 1,
        num_attention_heads=settings["n_head"],
        max_position_embeddings=context,
        attention_windows=[2, *windows],
        value_layers=sorted(int(number) + 1 for number in given),
        architectures=[ARCHITECTURE],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _renamed(stored: Mapping[str, Tensor], vocabulary: int, weights: Path) -> dict[str, Tensor]:
    """Return the tensors by our names in float32, tables without their padding rows."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        tensor = tensor.float()
        if name in _SCALES:
            found |= {
                f"model.layers.{number + 1}.{_SCALES[name]}": part.reshape(1)
                for number, part in enumerate(tensor.flatten())
            }
            continue
        layer = re.fullmatch(r"transformer\.h\.(\d+)\.(.*)", name)
        table = re.fullmatch(r"value_embeds\.(\d+)\.weight", name)
        if layer is not None and layer[2] in _LAYER:
            ours = f"model.layers.{int(layer[1]) + 1}.{_LAYER[layer[2]]}"
        elif table is not None:
            ours = f"model.value_embeds.{int(table[1]) + 1}.weight"
        elif name in _ELSEWHERE:
            ours = _ELSEWHERE[name]
        else:
            raise UserError(f"{weights}: nanochat of 2026 has no tensor {name}")
        if table is not None or name in ("transformer.wte.weight", "lm_head.weight"):
            tensor = tensor[:vocabulary]
        found[ours] = tensor.contiguous()
    return found


def _check(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], weights: Path
) -> None:
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise UserError(
            f"{weights}: {len(missing)} tensors of nanochat's model of 2026 are missing, the first "
            f"{missing[0]}; checkpoints of 2025 have another architecture, no longer loaded by "
            "nanochat itself"
        )
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise UserError(
            f"{weights}: {len(unknown)} tensors are not part of the model in its config, the first "
            f"{unknown[0]}"
        )
    wrong = sorted(name for name, shape in expected.items() if found[name] != shape)
    if wrong:
        raise UserError(
            f"{weights}: {wrong[0]} has the shape {found[wrong[0]]}; its config says "
            f"{expected[wrong[0]]}"
        )

"""Count the parameters of a decoder by kind, from its config.json.

Counts are those of the model that is trained: of one with a vision tower, the text part. A tied
output projection counts once.

Layers of dense decoders are all alike. Models with experts, recurrences or other parts have one
description for each layer (`ttrl.costs.families`). A model_type that is in neither place is counted
as a dense decoder, and `is_known` says so.

Letters in what follows: D width, F feed-forward width, H query heads, K key/value heads, E
dimension of a head, V vocabulary.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.configs import TrainingConfig
from ttrl.configs.recipe import MATRIX_NAMES, model_settings
from ttrl.costs.families import Kinds, knows, layers_of
from ttrl.costs.layers import NOTHING, Layer, Matrix, Values
from ttrl.errors import ModelFolderError

# What a family has whatever its config.json says, or where that is silent. `attention_bias` adds
# biases to q, k, v and output.
_QKV_BIAS = frozenset({"qwen2", "phi", "gpt2"})
# Of the output projection, the feed-forward layer, and of its LayerNorms.
_ALL_BIASES = frozenset({"phi", "gpt2"})
_PARALLEL = frozenset({"phi"})  # with a bias in the head, too
_BARE_NORMS = frozenset({"nanochat"})  # without a weight
_HEAD_NORMS = frozenset({"qwen3", "gemma3_text", "nanochat"})
_POST_NORMS = frozenset({"gemma2", "gemma3_text"})
_TIED = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gemma3n_text",
        "gemma4_text",
        "lfm2",
        "lfm2_moe",
        "smollm3",
    }
)
_TIED |= {"ernie4_5", "ernie4_5_moe", "cohere2"}
_SOFT_CAPS = frozenset({"gemma2"})
# Written once; checkpoints of all others hold a tied head twice.
_ONE_TIED_TENSOR = frozenset({"gemma2", "gpt2"})
# Two matrices in the feed-forward layer; all other families have three.
_UNGATED = frozenset({"phi", "gpt2", "nanochat"})
_BACK = ("down_proj", "w2", "output_linear", "experts back")
_DENSE = (
    frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"}) | _POST_NORMS | _UNGATED | {"phi3"}
)


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as far as the counts depend on it."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_dim: int
    feed_forward_width: int
    feed_forward_matrices: int
    vocabulary: int
    windows: tuple[int | None, ...]
    """Attention window of each layer that attends; None sees everything before it."""
    kinds: tuple[Layer, ...] = ()
    """Each layer, unless this is a dense decoder, whose layers are alike."""
    outside: Layer = NOTHING
    """What each token passes besides, embeddings, last norm and head apart."""

    @property
    def layer_weights(self) -> int:
        """Count the entries of the matrices that each token passes in one layer, on average where
        they differ.
        """
        if self.kinds:
            return sum(one.passed for one in self.kinds) // self.layers
        attention = self.width * self.head_dim * 2 * (self.heads + self.key_value_heads)
        return attention + self.feed_forward_matrices * self.width * self.feed_forward_width

    @property
    def layers_by_window(self) -> Mapping[int | None, int]:
        """Count the layers of each window."""
        return Counter(self.windows)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape from a Hugging Face config.json of the families that ttrl trains.

    Raises ModelFolderError where one is missing.
    """
    config = model_settings(config)
    kinds = layers_of(config)
    if kinds is not None:
        return _shape_of_kinds(config, kinds)

    def number(name: str, default: int | None = None) -> int:
        if default is None:
            value = config.get(name)
        else:
            value = config.get(name) or default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFolderError(
                f"config.json: {name} is {value!r}; a whole number above 0 is needed to count FLOPs"
            )
        return value

    layers = number("num_hidden_layers")
    width = number("hidden_size")
    heads = number("num_attention_heads")
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", width // heads),
        feed_forward_width=number(
            "intermediate_size", 4 * width if config.get("model_type") == "gpt2" else None
        ),
        feed_forward_matrices=2 if config.get("model_type") in _UNGATED else 3,
        vocabulary=number("vocab_size"),
        windows=_windows(config, layers),
    )


def _shape_of_kinds(config: Mapping[str, Any], kinds: Kinds) -> ModelShape:
    """Return the shape of a decoder whose layers are described one by one. Its feed-forward width
    is the widest that a token passes, and its heads are config.json's."""
    found = Values(config)
    return ModelShape(
        layers=len(kinds.layers),
        width=found.width,
        heads=found.heads,
        key_value_heads=found.key_value_heads,
        head_dim=found.head_dim,
        feed_forward_width=max(_inner_width(one) for one in kinds.layers),
        feed_forward_matrices=3,
        vocabulary=found.number("vocab_size"),
        windows=tuple(one.window for one in kinds.layers if one.pair),
        kinds=kinds.layers,
        outside=kinds.outside,
    )


def _inner_width(layer: Layer) -> int:
    backs = (one for one in layer.matrices if one.name in _BACK)
    return sum(one.before * one.chosen for one in backs)


def is_known(config: Mapping[str, Any]) -> bool:
    """Tell whether parameters are counted by what is known of a config.json's model_type; else as
    if it were a plain dense decoder."""
    kind = str(model_settings(config).get("model_type"))
    return kind in _DENSE or knows(kind)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    family = str(config.get("model_type"))
    if window is None or not config.get("use_sliding_window", not family.startswith("qwen")):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    # Folders from before transformers 4.53 leave the kinds to the family.
    if family.startswith("gemma2"):
        return tuple(window if layer % 2 == 0 else None for layer in range(layers))
    if family.startswith("gemma3"):
        every = config.get("sliding_window_pattern") or 6
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    if family.startswith("qwen"):
        return tuple(
            window if layer >= config.get("max_window_layers", 0) else None
            for layer in range(layers)
        )
    return (window,) * layers


@dataclass(frozen=True)
class DecoderParameters:
    """A decoder's parameters, and the traits that decide what it keeps for the backward pass."""

    shape: ModelShape
    family: str
    tied: bool
    """The output projection is the embeddings' matrix."""
    head_norms: bool
    """A norm over each head's query and key."""
    post_norms: bool
    """Four norms in a layer, not two."""
    parallel: bool
    """One norm in a layer, which attention and feed-forward layer read."""
    norm_vectors: int
    """What a norm has: 0, 1 (a weight) or 2 (and a bias)."""
    learned_positions: int
    """Rows of the table of positions."""
    soft_cap: bool
    """Attention scores are capped, which the fast way on CPUs cannot do."""
    silu: bool
    """The feed-forward layer's activation."""
    query_key_value_bias: bool
    head_bias: bool
    output_bias: bool
    feed_forward_bias: bool
    stored_dtype: str
    """Of the model's files: "bf16" or "fp16", else "fp32"."""
    looked_up: int = 0
    """Entries of further tables of embeddings."""

    @property
    def queries(self) -> int:
        """Return H·E."""
        return self.shape.heads * self.shape.head_dim

    @property
    def keys(self) -> int:
        """Return K·E."""
        return self.shape.key_value_heads * self.shape.head_dim

    @property
    def vocabulary_matrix(self) -> int:
        """Return V·D: of the embeddings, and of the output projection."""
        return self.shape.vocabulary * self.shape.width

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of one layer's matrices by the recipe's names: (width in, width out).
        Where layers differ, of all that adapters may go on, one of each name in transformers'
        class.
        """
        if self.shape.kinds:
            return {
                one.name: (one.before, one.behind)
                for layer in self.shape.kinds
                for one in layer.matrices
                if _may_adapt(one)
            }
        width = self.shape.width
        inner = self.shape.feed_forward_width
        shapes = {
            "q_proj": (width, self.queries),
            "k_proj": (width, self.keys),
            "v_proj": (width, self.keys),
            "output_proj": (self.queries, width),
            "w1": (width, inner),
            "w2": (inner, width),
        }
        return shapes | ({"w3": (width, inner)} if self.shape.feed_forward_matrices == 3 else {})

    @property
    def layer_vectors(self) -> int:
        """Count the entries of the norms and biases of one layer."""
        shape = self.shape
        norms = (
            shape.width * (1 if self.parallel else 4 if self.post_norms else 2)
            + 2 * shape.head_dim * self.head_norms
        )
        biases = (
            self.queries + 2 * self.keys
        ) * self.query_key_value_bias + shape.width * self.output_bias
        biases += (
            shape.feed_forward_width * (shape.feed_forward_matrices - 1) + shape.width
        ) * self.feed_forward_bias
        return self.norm_vectors * norms + biases

    @property
    def layer(self) -> int:
        """Count the parameters of one layer, on average where they differ."""
        if self.shape.kinds:
            return sum(one.parameters for one in self.shape.kinds) // self.shape.layers
        return self.shape.layer_weights + self.layer_vectors

    @property
    def outside_layers(self) -> int:
        """Count the embeddings, output projection and last norm, and what else is in no layer."""
        vectors = (
            self.shape.width * (self.norm_vectors + self.learned_positions)
            + self.shape.vocabulary * self.head_bias
        )
        others = self.looked_up + self.shape.outside.parameters
        return self.vocabulary_matrix * (1 if self.tied else 2) + vectors + others

    @property
    def total(self) -> int:
        """Count all parameters."""
        kinds = self.shape.kinds
        if kinds:
            layers = sum(one.parameters for one in kinds)
        else:
            layers = self.shape.layers * self.layer
        return layers + self.outside_layers

    @property
    def active(self) -> int:
        """Count the parameters that are active for a token: all but those of the experts that it
        does not pass. Embeddings count whole, as Qwen counts; OpenAI leaves them out."""
        return self.total - sum(one.idle for one in self.shape.kinds)

    @property
    def stored(self) -> int:
        """Count the entries of a checkpoint: a tied head is written once more, except where vLLM
        refuses it, and of transformers' own classes."""
        again = self.tied and self.family not in _ONE_TIED_TENSOR and not self.shape.kinds
        return self.total + (self.vocabulary_matrix if again else 0)


def has_tied_head(config: Mapping[str, Any]) -> bool:
    """Tell whether a model's output projection is the embeddings' matrix, by its config.json."""
    text = model_settings(config)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is None:
        return text.get("model_type") in _TIED
    return bool(tied)


def decoder_parameters(config: Mapping[str, Any]) -> DecoderParameters:
    """Return the parameters that a config.json describes. Raises ModelFolderError where a value is
    missing.
    """
    text = model_settings(config)
    family = str(text.get("model_type"))
    tied = has_tied_head(config)
    kinds = layers_of(text)
    if kinds is not None:
        return _decoder_of_kinds(config, family, tied, kinds)
    attention_bias = bool(text.get("attention_bias")) and family not in (
        "qwen2",
        "mistral",
        "phi3",
        "phi",
    )
    return DecoderParameters(
        shape=model_shape(config),
        family=family,
        tied=tied,
        head_norms=family in _HEAD_NORMS or bool(text.get("qk_layernorm") and family == "phi"),
        post_norms=family in _POST_NORMS,
        parallel=family in _PARALLEL,
        norm_vectors=0 if family in _BARE_NORMS else 2 if family in _ALL_BIASES else 1,
        learned_positions=text.get("max_position_embeddings", 1024) if family == "gpt2" else 0,
        soft_cap=family in _SOFT_CAPS and text.get("attn_logit_softcapping") is not None,
        silu=(text.get("hidden_activation") or text.get("hidden_act") or "silu") == "silu",
        query_key_value_bias=family in _QKV_BIAS or attention_bias,
        head_bias=family in _PARALLEL,
        output_bias=family in _ALL_BIASES or attention_bias,
        feed_forward_bias=family in _ALL_BIASES
        or (family == "llama" and bool(text.get("mlp_bias"))),
        stored_dtype=_stored_dtype(config),
    )


def _decoder_of_kinds(
    config: Mapping[str, Any], family: str, tied: bool, kinds: Kinds
) -> DecoderParameters:
    text = model_settings(config)
    silu = (text.get("hidden_activation") or text.get("hidden_act") or "silu") == "silu"
    return DecoderParameters(
        shape=_shape_of_kinds(text, kinds),
        family=family,
        tied=tied,
        head_norms=False,
        post_norms=False,
        parallel=False,
        norm_vectors=kinds.norm_vectors,
        learned_positions=0,
        soft_cap=False,
        silu=silu,
        query_key_value_bias=False,
        head_bias=kinds.head_bias,
        output_bias=False,
        feed_forward_bias=False,
        stored_dtype=_stored_dtype(config),
        looked_up=kinds.looked_up,
    )


def _stored_dtype(config: Mapping[str, Any]) -> str:
    names = ("dtype", "torch_dtype")  # of today, and of older files
    parts = (config, model_settings(config))
    said = [
        str(part[name]).removeprefix("torch.") for part in parts for name in names if part.get(name)
    ]
    return {"bfloat16": "bf16", "float16": "fp16"}.get(said[0] if said else "", "fp32")


def held_dtype(decoder: DecoderParameters, config: TrainingConfig) -> str:
    """Return the dtype of the weights that training holds frozen: "fp32", "bf16" or "fp16".

    Matrices in 4 bits are not meant.
    """
    if config.lora_rank is None:
        return "fp32"
    if config.lora_base_dtype in ("auto", "nf4"):
        return decoder.stored_dtype
    return config.lora_base_dtype


def adapted_shapes(decoder: DecoderParameters, config: TrainingConfig) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of all layers that have adapters of low rank: (width in,
    width out).
    """
    shape = decoder.shape
    if config.lora_rank is None:
        return []
    if not shape.kinds:
        return [
            ends for name, ends in decoder.matrix_shapes.items() if name in config.lora_targets
        ] * shape.layers
    wanted = set(config.lora_targets).union(*(MATRIX_NAMES[name] for name in config.lora_targets))
    matrices = (one for layer in shape.kinds for one in layer.matrices)
    return [(one.before, one.behind) for one in matrices if one.name in wanted]


def _may_adapt(matrix: Matrix) -> bool:
    """Tell whether adapters may go on a matrix of transformers' class; on experts they never do."""
    return matrix.name in MATRIX_NAMES or any(
        matrix.name in names for names in MATRIX_NAMES.values()
    )


def adapter_parameters(decoder: DecoderParameters, config: TrainingConfig) -> int:
    """Count the parameters of all adapters of low rank; 0 without adapters."""
    rank = config.lora_rank
    shape = decoder.shape
    if rank is None:
        return 0
    of_rows = 1 if config.lora_kind == "dora" else 0
    total = sum(
        rank * (before + behind) + of_rows * behind
        for before, behind in adapted_shapes(decoder, config)
    )
    if "output" in config.lora_targets and not decoder.tied:
        total += rank * (shape.width + shape.vocabulary) + of_rows * shape.vocabulary
    return total


def undivided_parameters(decoder: DecoderParameters, config: TrainingConfig) -> int:
    """Count those of the adapters that each process of `tensor_parallel` holds whole: of a matrix
    whose rows it deals out, what has the columns' side, and the other way round."""
    rank = config.lora_rank
    shape = decoder.shape
    if rank is None or config.tensor_parallel == 1:
        return 0
    of_rows = 1 if config.lora_kind == "dora" else 0
    own = {
        name: ends for name, ends in decoder.matrix_shapes.items() if name in config.lora_targets
    }
    total = sum(
        (rank + of_rows) * ends[1] if name in ("output_proj", "w2") else rank * ends[0]
        for name, ends in own.items()
    )
    return shape.layers * total + (
        rank * shape.width if "output" in config.lora_targets and not decoder.tied else 0
    )


def trained_parameters(decoder: DecoderParameters, config: TrainingConfig) -> int:
    """Count the parameters that have a gradient: the adapters' where there are any, else all."""
    if config.lora_rank is None:
        return decoder.total
    return adapter_parameters(decoder, config)

"""Count the parameters of a decoder by kind, from its config.json.

Counts are those of the trained model: of one with a vision tower, the text part. A tied output
projection counts once. A model_type without an entry in `ttrl.families.table` is counted as a dense
decoder, and `is_known` says so.

Letters: D width, H query heads, K key/value heads, E dimension of a head, V vocabulary.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.configs import TrainingConfig
from ttrl.configs.recipe import MATRIX_NAMES
from ttrl.families.layers import Kinds, Layer, Matrix
from ttrl.families.own import OwnDecoder
from ttrl.families.table import UNKNOWN, family_of
from ttrl.families.values import Values, model_settings

_BACK = ("down_proj", "w2", "output_linear", "experts back")


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as far as the counts depend on it."""

    width: int
    heads: int
    key_value_heads: int
    head_dim: int
    feed_forward_width: int
    """The widest vector of a token."""
    vocabulary: int
    kinds: tuple[Layer, ...]
    """Each layer."""
    outside: Layer
    """Each token's other parameters, embeddings, last norm and head excluded."""

    @property
    def layers(self) -> int:
        """Count the layers."""
        return len(self.kinds)

    @property
    def layer_weights(self) -> int:
        """Count the entries of the matrices each token passes in one layer, on average if layers
        differ.
        """
        return sum(one.passed for one in self.kinds) // self.layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the attention window of each layer with attention; None sees everything before
        it.
        """
        return tuple(one.window for one in self.kinds if one.pair)

    @property
    def layers_by_window(self) -> Mapping[int | None, int]:
        """Count the layers of each window."""
        return Counter(self.windows)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape from a Hugging Face config.json of ttrl's families.

    Raises ModelFolderError if a number is missing.
    """
    return decoder_parameters(config).shape


def _shape(values: Values, kinds: Kinds) -> ModelShape:
    return ModelShape(
        width=values.width,
        heads=values.heads,
        key_value_heads=values.key_value_heads,
        head_dim=values.head_dim,
        feed_forward_width=max(_inner_width(one) for one in kinds.layers),
        vocabulary=values.number("vocab_size", least=1),
        kinds=kinds.layers,
        outside=kinds.outside,
    )


def _inner_width(layer: Layer) -> int:
    backs = (one for one in layer.matrices if one.name in _BACK)
    return sum(one.before * one.chosen for one in backs)


def is_known(config: Mapping[str, Any]) -> bool:
    """Tell whether ttrl knows a config.json's model_type; otherwise parameters are counted as a
    plain dense decoder's."""
    return family_of(config) is not UNKNOWN


@dataclass(frozen=True)
class DecoderParameters:
    """A decoder's parameters, and its traits with an effect on the backward pass's memory."""

    shape: ModelShape
    own: OwnDecoder | None
    """The family's traits in ttrl's own decoder; None: transformers' class is trained."""
    tied: bool
    """The output projection is the embeddings' matrix."""
    head_norms: bool
    """A norm over each head's query and key, in ttrl's own decoder."""
    soft_cap: bool
    """Attention scores are capped; the fast way on CPUs cannot do it."""
    norm_vectors: int
    """The last norm's vectors: 0, 1 (a weight) or 2 (and a bias)."""
    head_bias: bool
    looked_up: int
    """Entries of further tables of embeddings."""
    stored_dtype: str
    """Of the model's files: "bf16" or "fp16", else "fp32"."""

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
        """Return the shapes of the matrices for adapters, by name: (width in, width out). The names
        are the recipe's, or those of transformers' class; if layers differ, one matrix of each
        name.
        """
        return {
            one.name: (one.before, one.behind)
            for layer in self.shape.kinds
            for one in layer.matrices
            if _may_adapt(one)
        }

    @property
    def layer(self) -> int:
        """Count the parameters of one layer, on average if layers differ."""
        return sum(one.parameters for one in self.shape.kinds) // self.shape.layers

    @property
    def outside_layers(self) -> int:
        """Count the embeddings, output projection, last norm, and others outside of layers."""
        vectors = self.shape.width * self.norm_vectors + self.shape.vocabulary * self.head_bias
        others = self.looked_up + self.shape.outside.parameters
        return self.vocabulary_matrix * (1 if self.tied else 2) + vectors + others

    @property
    def total(self) -> int:
        """Count all parameters."""
        return sum(one.parameters for one in self.shape.kinds) + self.outside_layers

    @property
    def active(self) -> int:
        """Count a token's active parameters: all but those of unused experts. Embeddings count
        whole, as Qwen counts; OpenAI leaves them out."""
        return self.total - sum(one.idle for one in self.shape.kinds)

    @property
    def stored(self) -> int:
        """Count the entries of a checkpoint: a tied head is written once more, except if vLLM
        refuses it, and in transformers' own classes."""
        again = self.tied and self.own is not None and self.own.tied_head_in_files
        return self.total + (self.vocabulary_matrix if again else 0)


def has_tied_head(config: Mapping[str, Any]) -> bool:
    """Tell whether a model's output projection is the embeddings' matrix, by its config.json."""
    text = model_settings(config)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is None:
        return family_of(text).tied
    return bool(tied)


def decoder_parameters(config: Mapping[str, Any]) -> DecoderParameters:
    """Return the parameters described by a config.json. Raises ModelFolderError if a value is
    missing.
    """
    values = Values(model_settings(config))
    family = family_of(config)
    kinds = family.layers(values)
    own = family.own
    return DecoderParameters(
        shape=_shape(values, kinds),
        own=own,
        tied=has_tied_head(config),
        head_norms=own is not None and values.says(own.qk_norm),
        soft_cap=own is not None and own.caps_scores(values),
        norm_vectors=kinds.norm_vectors,
        head_bias=kinds.head_bias,
        looked_up=kinds.looked_up,
        stored_dtype=_stored_dtype(config),
    )


def _stored_dtype(config: Mapping[str, Any]) -> str:
    names = ("dtype", "torch_dtype")  # of today, and of older files
    parts = (config, model_settings(config))
    said = [
        str(part[name]).removeprefix("torch.") for part in parts for name in names if part.get(name)
    ]
    return {"bfloat16": "bf16", "float16": "fp16"}.get(said[0] if said else "", "fp32")


def held_dtype(decoder: DecoderParameters, config: TrainingConfig) -> str:
    """Return the dtype of the frozen weights: "fp32", "bf16" or "fp16".

    Matrices in 4 bits are not meant.
    """
    if config.lora_rank is None:
        return "fp32"
    if config.lora_base_dtype in ("auto", "nf4"):
        return decoder.stored_dtype
    return config.lora_base_dtype


def adapted_shapes(decoder: DecoderParameters, config: TrainingConfig) -> list[tuple[int, int]]:
    """Return the shapes of all layers' matrices with low-rank adapters: (width in, width out)."""
    if config.lora_rank is None:
        return []
    wanted = set(config.lora_targets).union(*(MATRIX_NAMES[name] for name in config.lora_targets))
    matrices = (one for layer in decoder.shape.kinds for one in layer.matrices)
    return [(one.before, one.behind) for one in matrices if one.name in wanted]


def _may_adapt(matrix: Matrix) -> bool:
    """Tell whether adapters may go on a matrix; on experts they never do."""
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
    """Count the adapter parameters held whole by each process of `tensor_parallel`: for a matrix
    divided by rows, those on the columns' side, and the other way round."""
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
    """Count the parameters with a gradient: the adapters' if there are any, else all."""
    if config.lora_rank is None:
        return decoder.total
    return adapter_parameters(decoder, config)

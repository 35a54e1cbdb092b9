"""Map a transformers class's parameters to its checkpoints: each stored tensor is a view of one.

transformers 5 converts on loading: it renames, and stacks the matrices of all experts into one
parameter. Its own conversion table, read backwards, maps each part of a parameter to its name in a
file. These parts are views here: one description serves loading (copy into the view), writing (copy
from it) and every comparison tensor by tensor.
"""

import copy
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from ttrl.errors import ModelFolderError

HEAD = "lm_head.weight"
EMBEDDINGS = "tok_embeddings"
LAYERS = "layers"
"""Our names of the embedding parts, and of the layers."""
_THEIR_EMBEDDINGS = "embed_tokens.weight"


class _ChunkView(Chunk):
    """Chunk without its copies."""

    def convert(  # type: ignore[override]  # the other one is decorated
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **others: Any
    ) -> Any:
        ((tensor,),) = input_dict.values()
        targets = self.get_target_patterns(target_patterns, **others)
        return dict(zip(targets, torch.chunk(tensor, len(targets), dim=self.dim), strict=True))


class _SplitView(SplitModulelist):
    """SplitModulelist, leaving other sides of length 1 unchanged."""

    def convert(  # type: ignore[override]  # the other one is decorated
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **others: Any
    ) -> Any:
        found: dict[str, Tensor] = {}
        for source, given in input_dict.items():
            if isinstance(given, list):
                tensor = given[0]
            else:
                tensor = given
            targets = self.get_target_patterns(
                input_dict, source, target_patterns, tensor.size(self.dim)
            )
            found |= zip(targets, tensor.unbind(self.dim), strict=True)
        return found


class _TransposeView(Transpose):
    """Transpose without its copy."""

    def convert(  # type: ignore[override]  # the other one is decorated
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **others: Any
    ) -> Any:
        if self.check_dims:
            return {
                self.get_target_pattern(input_dict, source_patterns, target_patterns): next(
                    iter(input_dict.values())
                )[0]
            }
        ((tensor,),) = input_dict.values()
        return {
            self.get_target_pattern(input_dict, source_patterns, target_patterns): tensor.transpose(
                self.dim0, self.dim1
            )
        }


def _as_view(operation: Any, model_type: str) -> Any:
    if isinstance(operation, Chunk):
        return _ChunkView(operation.dim, operation.num_shards_attribute)
    if isinstance(operation, SplitModulelist):
        return _SplitView(operation.dim)
    if isinstance(operation, Transpose):
        return _TransposeView(operation.dim0, operation.dim1, operation.check_dims)
    kind = type(operation).__name__
    raise ModelFolderError(
        f"{model_type} models store matrices rearranged ({kind}); ttrl cannot write that yet"
    )


class Names(NamedTuple):
    """Names of parameters: theirs (the class with its head) and ours (the decoder)."""

    base: str
    """Of the model without its head."""
    parts: Mapping[str, str]
    """Our names of its parts, by theirs, if different."""

    def theirs(self, ours: str) -> str:
        """Return transformers' name of a decoder's parameter."""
        first, _, rest = ours.partition(".")
        if first == "output":
            return f"lm_head.{rest}"
        known = {own: theirs for theirs, own in self.parts.items()}
        return f"{self.base}.{known.get(first, first)}.{rest}"

    def ours(self, theirs: str) -> str:
        """Undo `theirs`."""
        first, _, rest = theirs.partition(".")
        if first == "lm_head":
            return f"output.{rest}"
        first, _, rest = theirs.removeprefix(f"{self.base}.").partition(".")
        return f"{self.parts.get(first, first)}.{rest}"


def names_of(whole: PreTrainedModel) -> Names:
    """Return the names of a model with its head."""
    base: Any = whole.base_model
    embeddings = whole.get_input_embeddings()
    layers = whole.config.num_hidden_layers
    parts = {}
    for name, child in base.named_children():
        if child is embeddings:
            parts[name] = EMBEDDINGS
        elif isinstance(child, nn.ModuleList) and len(child) == layers:
            parts[name] = LAYERS
    return Names(whole.base_model_prefix, parts)


class Layout:
    """How checkpoints of a model class name and divide its parameters."""

    def __init__(self, whole: PreTrainedModel) -> None:
        """Describe a model with its head, also on the meta device. Raises ModelFolderError for
        conversions beyond views."""
        self._whole = whole
        self.names = names_of(whole)
        mapping = get_model_conversion_mapping(whole, add_legacy=False)
        kept = [one for one in mapping if not isinstance(one, PrefixChange)]
        backwards: list[WeightTransform] = [one.reverse_transform() for one in kept[::-1]]
        self._renamings = [one for one in backwards if isinstance(one, WeightRenaming)]
        self._converters = [one for one in backwards if isinstance(one, WeightConverter)]
        for converter in self._converters:
            converter.operations = [
                _as_view(one, whole.config.model_type) for one in converter.operations
            ]
        self.ignored: frozenset[str] = frozenset(whole._keys_to_ignore_on_load_unexpected or ())
        """Patterns of stored names left out by the class."""

    def views(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return a decoder parameter's stored tensors, by their names."""
        theirs = self.names.theirs(name)
        renamed, pattern = rename_source_key(
            theirs, self._renamings, self._converters, reverse=True
        )
        if pattern is None:
            return {renamed: parameter}
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        own = copy.deepcopy(converter)
        own.add_tensor(renamed, theirs, pattern, parameter)  # type: ignore[arg-type]
        found: dict[str, Tensor] = own.convert(
            renamed, model=self._whole, config=self._whole.config
        )
        return found


class Prefixes(NamedTuple):
    """A folder's name prefixes in place of the layout's "model." and "lm_head."."""

    base: str = "model."
    head: str = "lm_head."

    def stored(self, name: str) -> str:
        """Return the name in the folder."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head.")
        if name.startswith("model."):
            return self.base + name.removeprefix("model.")
        return name


def prefixes_among(stored: Iterable[str], own: Iterable[str]) -> Prefixes:
    """Return the prefixes of a folder's names: a model with towers keeps its text part under one of
    its own. Takes the prefixes matching most names. `own`: names of the layout."""
    names = set(stored)
    wanted = set(own)
    found = Prefixes()
    if wanted <= names:
        return found
    bases = {
        name.removesuffix(_THEIR_EMBEDDINGS) for name in names if name.endswith(_THEIR_EMBEDDINGS)
    }
    heads = {name.removesuffix("weight") for name in names if name.endswith(HEAD)}
    every = [
        Prefixes(base, head)
        for base in sorted({found.base, *bases})
        for head in sorted({found.head, *heads})
    ]

    def fits(prefixes: Prefixes) -> int:
        return sum(prefixes.stored(name) in names for name in wanted)

    return max([found, *every], key=fits)


def whole_model(config: PretrainedConfig, **how: Any) -> PreTrainedModel:
    """Make a model of the config's class with its head, on the current default device."""
    given = copy.deepcopy(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        given, dtype=torch.get_default_dtype(), **how
    )
    return model


def layout_of_class(config: PretrainedConfig) -> tuple[Layout, dict[str, Tensor]]:
    """Return the layout of a config's class, and its parameters on the meta device by the decoder's
    names."""
    kind: Any = type(config)
    return _layout_of(json.dumps(config.to_dict(), sort_keys=True, default=str), kind)


@functools.lru_cache(maxsize=4)
def _layout_of(config: str, kind: type[PretrainedConfig]) -> tuple[Layout, dict[str, Tensor]]:
    with torch.device("meta"):
        model = whole_model(kind.from_dict(json.loads(config)))
    return Layout(model), stored_parameters(model)


def stored_parameters(whole: PreTrainedModel) -> dict[str, Tensor]:
    """Return the contents of a model's checkpoints: parameters and buffers, by the decoder's names.
    A tied head is left out."""
    tied = bool(whole.config.tie_word_embeddings)
    names = names_of(whole)
    named = whole.state_dict(keep_vars=True).items()
    return {names.ours(name): tensor for name, tensor in named if not (tied and name == HEAD)}

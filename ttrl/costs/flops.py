"""Exact floating-point operations of training and generating, from a model's config.json and the tokens that are really computed.

A multiplication and an addition count as two operations. Counted are the matrix products: projections, feed-forward, attention
scores and values, output projection. Norms, activations, softmax and RoPE are left out, as usual (about 1%); so is whatever is
computed again (activation checkpointing, attention's backward pass), which makes the numbers those of the model, not of a way to
compute it ("model FLOPs", PaLM, arXiv 2204.02311).

Attention is counted in pairs of a query and a key that it may see, not as rows × seq_len². In packed trees of samples, the keys
that a query sees are its sample's tokens up to itself, whatever the tree: position + 1 of them, or as many as its window holds.

Needs nothing but Python.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.errors import ModelFolderError

_UNGATED = frozenset({"phi"})  # two matrices in the feed-forward layer; all other families have three


@dataclass(frozen=True)
class ModelShape:
    """What the counts need to know of a dense decoder."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_dim: int
    feed_forward_width: int
    feed_forward_matrices: int
    vocabulary: int
    windows: tuple[int | None, ...]
    """Of each layer's attention; None sees everything before it."""

    @property
    def layer_weights(self) -> int:
        """Entries of the matrices that each token passes in one layer."""
        attention = self.width * self.head_dim * 2 * (self.heads + self.key_value_heads)
        return attention + self.feed_forward_matrices * self.width * self.feed_forward_width

    @property
    def layers_by_window(self) -> Mapping[int | None, int]:
        """How many layers have which window."""
        return Counter(self.windows)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """From the values of a Hugging Face config.json of the Llama, Qwen, Mistral, Gemma or Phi families.

    Raises ModelFolderError where one is missing.
    """
    config = config.get("text_config") or config

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name) if default is None else config.get(name) or default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFolderError(f"config.json: {name} is {value!r}; a whole number above 0 is needed to count FLOPs")
        return value

    layers, width, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", width // heads),
        feed_forward_width=number("intermediate_size"),
        feed_forward_matrices=2 if config.get("model_type") in _UNGATED else 3,
        vocabulary=number("vocab_size"),
        windows=_windows(config, layers),
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window, family = config.get("sliding_window"), str(config.get("model_type"))
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
        return tuple(window if layer >= config.get("max_window_layers", 0) else None for layer in range(layers))
    return (window,) * layers


def attention_pairs(positions: Iterable[int], window: int | None = None) -> int:
    """Pairs of query and key that may see each other, one head of one layer: `positions` are `input_pos` of all tokens that are
    not padding."""
    if window is None:
        return sum(position + 1 for position in positions)
    return sum(min(position + 1, window) for position in positions)


def consecutive_pairs(start: int, stop: int, window: int | None = None) -> int:
    """`attention_pairs` of the positions from `start` up to, not including, `stop`."""
    if window is None or stop <= window:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    if start >= window:
        return (stop - start) * window
    return consecutive_pairs(start, window) + (stop - window) * window


@dataclass(frozen=True)
class Flops:
    """Floating-point operations by part. The backward pass has two products for each of the forward pass."""

    layers: int
    """Projections and feed-forward."""
    attention: int
    head: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.layers + self.attention + self.head

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.layers + other.layers, self.attention + other.attention, self.head + other.head)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.layers * times, self.attention * times, self.head * times)


def forward_flops(shape: ModelShape, tokens: int, pairs: Mapping[int | None, int], head_positions: int) -> Flops:
    """Of one forward pass: `tokens` that pass the layers, `pairs` of queries and keys for each window of the model, and the
    positions that are projected to the vocabulary."""
    attention = sum(count * pairs[window] for window, count in shape.layers_by_window.items())
    return Flops(
        layers=2 * shape.layers * shape.layer_weights * tokens,
        attention=4 * shape.heads * shape.head_dim * attention,
        head=2 * shape.width * shape.vocabulary * head_positions,
    )


def training_flops(shape: ModelShape, positions: Iterable[int], trained: int) -> Flops:
    """Of a forward and a backward pass over packed tokens, all weights trained: `positions` are `input_pos` of all tokens that
    are not padding, `trained` is the number of labels."""
    counts = Counter(positions)
    pairs = {
        window: sum(times * attention_pairs((position,), window) for position, times in counts.items())
        for window in shape.layers_by_window
    }
    return forward_flops(shape, counts.total(), pairs, trained) * 3


def prefill_flops(shape: ModelShape, prompt: int, cached: int = 0) -> Flops:
    """Of reading a prompt of so many tokens, the first `cached` of which are in the key-value cache; one position is
    projected."""
    pairs = {window: consecutive_pairs(cached, prompt, window) for window in shape.layers_by_window}
    return forward_flops(shape, prompt - cached, pairs, 1)


def decode_flops(shape: ModelShape, prompt: int, completion: int) -> Flops:
    """Of generating a completion, behind a prompt that has been read and has yielded the first token: the last token is never
    an input."""
    steps = max(0, completion - 1)
    pairs = {window: consecutive_pairs(prompt, prompt + steps, window) for window in shape.layers_by_window}
    return forward_flops(shape, steps, pairs, steps)

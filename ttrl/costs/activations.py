"""Count a layer's memory for its backward pass, in bytes per token of a microbatch.

Counted from the operations of `ttrl.training.models` and autograd's saved tensors: a matrix product
its input, a norm its input, an elementwise product both factors, the attention its queries, keys,
values, output and log-sum-exp. The stream between the layers is fp32; under bf16 matrix products
save a copy of their input in bf16 and share it. On the CPU, an RMSNorm is several operations, and a
trained one saves its normed input, too.

On the CPU, soft caps, and windows shorter than the samples, need a dense mask: its bytes grow with
the row's length.

CUDA: from the same operations and FlexAttention's saved tensors; held to an H100
(docs/explanation/speed.md).

Layers of transformers' own classes (`described_layer_bytes`) keep the sum of their parts, with
copies of a token for each of its experts.

Letters: D width, F feed-forward width, H query heads, K key/value heads, E dimension of a head, T
tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttrl.costs.parameters import DecoderParameters
from ttrl.families.layers import Layer

_FP32 = 4


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for each token."""

    kept: float
    """From the forward pass to the layer's backward pass."""
    input: float
    """Kept instead by a checkpointed layer: the stream."""
    products: float
    """Kept in addition, unless products and attention are recomputed."""
    backward: float
    """Gradients between the layer's operations at their peak, less the memory freed by then."""


@dataclass(frozen=True)
class Computation:
    """A model's computation, as far as memory depends on it."""

    bf16: bool = False
    cuda: bool = False
    tensor_parallel: int = 1
    frozen: bool = False
    """Whether only adapters are trained, so norms have no gradient."""

    @property
    def bytes(self) -> int:
        """Return the bytes of a number in matrix products."""
        if self.bf16:
            return 2
        return _FP32


def layer_bytes(
    decoder: DecoderParameters, how: Computation, dense_lengths: Sequence[int | None] = ()
) -> list[LayerBytes]:
    """Return the bytes kept by each layer. dense_lengths: T of each layer of ttrl's own decoder
    with a dense mask, else None; empty: none does.
    """
    if decoder.own is None:
        return [described_layer_bytes(one, decoder.shape.width, how) for one in decoder.shape.kinds]
    lengths = dense_lengths or [None] * decoder.shape.layers
    return [own_layer_bytes(decoder, how, length) for length in lengths]


def largest_layer_bytes(decoder: DecoderParameters, how: Computation) -> LayerBytes:
    """Return the bytes of the layer with the most."""
    return max(layer_bytes(decoder, how), key=lambda one: one.kept)


def own_layer_bytes(
    decoder: DecoderParameters, how: Computation, dense_length: int | None = None
) -> LayerBytes:
    """Return the bytes of a layer of ttrl's own decoder. dense_length: T, with a dense mask."""
    own = decoder.own
    assert own is not None
    width = decoder.shape.width
    size = how.bytes
    parts = how.tensor_parallel
    queries = decoder.queries / parts
    keys = decoder.keys / parts
    feed_forward = decoder.shape.feed_forward_width / parts
    heads = decoder.shape.heads / parts
    gated = own.gated_mlp
    parallel = own.parallel

    inner_inputs = 1 if parallel and size == _FP32 else 2  # of attention and feed-forward layer
    norms = (
        width * (1 if parallel else 4 if own.post_norms else 2)
        + (queries + keys) * decoder.head_norms
    )
    if own.norm in ("rms", "rms_plus_one") and not (how.cuda or how.frozen):
        norms *= 2
    products = feed_forward * size * (4 if gated else 2)
    attention = 2 * queries * size + heads * _FP32
    if dense_length is None:
        # FlexAttention has them once for each query head.
        attention += 2 * (queries if how.cuda else keys) * size
    else:
        attention += 2 * queries * size  # keys and values repeated for each query head
        if decoder.soft_cap:
            attention += heads * dense_length * (2 * _FP32 + (size if how.bf16 else 0))
    between = width * _FP32 * 3 + (2 if gated else 1) * feed_forward * size
    if dense_length is not None and decoder.soft_cap:
        between = max(between, 3 * heads * dense_length * _FP32)
    results = (2 * queries + 2 * keys + 2 * width + (2 if gated else 1) * feed_forward) * size
    return LayerBytes(
        kept=norms * _FP32 + inner_inputs * width * size + attention + products,
        input=width * _FP32,
        products=results,
        backward=between,
    )


def described_layer_bytes(layer: Layer, width: int, how: Computation) -> LayerBytes:
    """Return the bytes of a layer of transformers' own class, from its matrices and parts.

    A norm keeps its input, in fp32, and the input without its length; each matrix its input; the
    rest is in `Layer.kept`, with the chunks of recurrences as transformers computes them in
    PyTorch; kernels of other packages keep less. For a layer of tiny models on the CPU, this is
    within 20% of autograd's real memory, and the peak of their gradients is within 10%
    (tests/costs/test_families.py). width: D.
    """
    size = how.bytes
    stream = width * _FP32
    inputs = sum(one.before * one.chosen for one in layer.matrices if one.before != width)
    products = sum(one.behind * one.chosen for one in layer.matrices)
    kept = layer.norms * (2 * stream + width * size) + (inputs + layer.kept) * size
    widest = max((one.behind * one.chosen for one in layer.matrices), default=0)
    return LayerBytes(
        kept=kept, input=stream, products=products * size, backward=3 * stream + 2 * widest * size
    )

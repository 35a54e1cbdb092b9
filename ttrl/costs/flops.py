"""Count the exact floating-point operations of training and generating, from config.json and the
computed tokens.

A multiplication and an addition count as two operations. Counted are the matrix products:
projections, feed-forward, attention scores and values, output projection. Norms, activations,
softmax and RoPE are left out, as usual (about 1%). Recomputation (activation checkpointing,
attention's backward pass) is counted separately, in `recomputed_flops`: without it the numbers are
those of the model, not of a way to compute it ("model FLOPs", PaLM, arXiv 2204.02311).

Attention is counted in pairs of a query and a visible key, not as rows × seq_len². In packed trees
of samples, a query sees its sample's tokens up to itself, whatever the tree: position + 1 of them,
or as many as its window holds.

Needs nothing but Python.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ttrl.configs import TrainingConfig
from ttrl.costs.parameters import DecoderParameters, ModelShape, adapted_shapes


def consecutive_pairs(start: int, stop: int, window: int | None = None) -> int:
    """Count the visible pairs of query and key, for one head of one layer: queries at the positions
    from `start` up to, not including, `stop`."""
    if window is None or stop <= window:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    if start >= window:
        return (stop - start) * window
    return consecutive_pairs(start, window) + (stop - window) * window


@dataclass(frozen=True)
class Flops:
    """Floating-point operations by part. The backward pass has two products for each of the forward
    pass.
    """

    layers: int
    """Projections, feed-forward and recurrences."""
    attention: int
    head: int

    @property
    def total(self) -> int:
        """Add up all parts."""
        return self.layers + self.attention + self.head

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.layers + other.layers, self.attention + other.attention, self.head + other.head
        )

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.layers * times, self.attention * times, self.head * times)


def forward_flops(
    shape: ModelShape, tokens: int, pairs: Mapping[int | None, int], head_positions: int
) -> Flops:
    """Count one forward pass: `tokens` through the layers, `pairs` of queries and keys for each
    window of the model, and the positions projected to the vocabulary."""
    products = sum(one.passed + one.scan for one in (*shape.kinds, shape.outside))
    attention = sum(one.pair * pairs[one.window] for one in shape.kinds if one.pair)
    head = 2 * shape.width * shape.vocabulary * head_positions
    return Flops(2 * products * tokens, 2 * attention, head)


def sampling_flops(shape: ModelShape, reads: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Count a server's work for answers: (prefill, decode). `reads`: of each answer, the tokens of
    its prompt, how many of them were computed before (for another answer, or in the prefix cache),
    and the generated tokens.

    A fully cached prompt is not read; its last position is still projected, once for each answer.
    """
    prefill = decode = 0
    for (prompt, known, completion), times in Counter(reads).items():
        prefill += prefill_flops(shape, prompt, min(known, prompt)).total * times
        decode += decode_flops(shape, prompt, completion).total * times
    return prefill, decode


def prefill_flops(shape: ModelShape, prompt: int, cached: int = 0) -> Flops:
    """Count the reading of a prompt with its first `cached` tokens in the KV cache; one position is
    projected.
    """
    pairs = {window: consecutive_pairs(cached, prompt, window) for window in shape.layers_by_window}
    return forward_flops(shape, prompt - cached, pairs, 1)


def decode_flops(shape: ModelShape, prompt: int, completion: int) -> Flops:
    """Count the generation of a completion after reading the prompt and sampling the first token:
    the last token is never an input."""
    steps = max(0, completion - 1)
    pairs = {
        window: consecutive_pairs(prompt, prompt + steps, window)
        for window in shape.layers_by_window
    }
    return forward_flops(shape, steps, pairs, steps)


def pass_flops(
    decoder: DecoderParameters,
    config: TrainingConfig,
    tokens: int,
    pairs: Mapping[int | None, int],
    head_positions: int,
) -> Flops:
    """Count a forward and a backward pass; arguments as for `forward_flops`.

    With adapters of low rank the model's own matrices have no gradient: each costs a product
    forward and, if its input has a gradient, one back. An adapter costs the same as any two trained
    matrices of its size. The first layer reads embeddings, also frozen: no gradient flows back
    beyond the first trained matrix. Left out: products of an adapter's two matrices (DoRA's row
    lengths, a merged head), made once in a pass however many tokens it has. In transformers'
    classes the first layer counts like any other.
    """
    shape = decoder.shape
    forward = forward_flops(shape, tokens, pairs, head_positions)
    if config.lora_rank is None:
        return forward * 3
    if decoder.own is None:
        # Recurrences and attention have two products back for each, like adapters; frozen matrices
        # have one.
        scans = 2 * tokens * sum(one.scan for one in shape.kinds)
        adapters = 3 * tokens * _all_adapters(decoder, config)
        head = forward.head * (3 if "output" in config.lora_targets and not decoder.tied else 2)
        return Flops(2 * forward.layers + scans + adapters, 3 * forward.attention, head)
    layers = forward.layers
    attention = forward.attention
    reached = False
    for window in shape.windows:
        one_product = 2 * decoder.queries * pairs[window]
        layer, products, reached = _layer_with_adapters(decoder, config, config.lora_rank, reached)
        layers += tokens * layer
        attention += one_product * products
    head = forward.head * (2 if reached else 1)
    if "output" in config.lora_targets and not decoder.tied:
        head += forward.head  # of the merged matrix; its adapter's gradient comes from it
    return Flops(layers, attention, head)


def forward_only_flops(
    decoder: DecoderParameters,
    config: TrainingConfig,
    tokens: int,
    pairs: Mapping[int | None, int],
    head_positions: int,
) -> Flops:
    """Count a forward pass without gradient, adapters of low rank included; arguments as for
    `forward_flops`.
    """
    adapters = tokens * _all_adapters(decoder, config)
    return forward_flops(decoder.shape, tokens, pairs, head_positions) + Flops(adapters, 0, 0)


def recomputed_flops(
    decoder: DecoderParameters,
    config: TrainingConfig,
    tokens: int,
    pairs: Mapping[int | None, int],
    head_positions: int,
    *,
    head_again: int = 0,
    fused_attention: bool = True,
) -> Flops:
    """Count the backward pass's recomputation; arguments as for `forward_flops`.

    - With `activation_checkpointing` of everything, one layer in `checkpoint_every`. PyTorch
      stops at the last result in use: the layer's last product (with w2, or with its adapter) is
      not made again unless a norm follows. Of transformers' classes all of a
      layer counts.
    - With `fused_attention` (all ways of ours), the scores, one product of the forward pass' two.
    - So many products of the head as `head_again` says: the logits
      (`ttrl.training.kernels.logprobs`, "recompute"), and one for each separate part of the
      gradient (`apart` there).
    """
    shape = decoder.shape
    head = 2 * shape.width * shape.vocabulary * head_positions * head_again
    again = config.activation_checkpointing and config.checkpoint_keeps == "nothing"
    layers = attention = 0
    recomputed = 0
    for number, one in enumerate(shape.kinds):
        products = 2 * one.pair * pairs[one.window] if one.pair else 0
        if fused_attention:
            attention += products // 2
        if again and number % config.checkpoint_every == 0:
            recomputed += 1
            attention += products
            layers += tokens * 2 * (one.passed + one.scan)
    adapters = tokens * _all_adapters(decoder, config)
    if decoder.own is None:
        layers += adapters // config.checkpoint_every if again else 0
    else:
        layers += adapters // shape.layers * recomputed
        layers -= tokens * _not_made_again(decoder, config, recomputed)
    return Flops(layers, attention, head)


def _not_made_again(decoder: DecoderParameters, config: TrainingConfig, recomputed: int) -> int:
    """Return the operations in so many recomputed layers of ttrl's own decoder, for each token,
    without use in the backward pass.
    """
    own = decoder.own
    shape = decoder.shape
    assert own is not None
    adapted = set[str]()
    if config.lora_rank is not None:
        adapted = {name for name in decoder.matrix_shapes if name in config.lora_targets}
    left = 0
    if not own.post_norms:
        last = shape.feed_forward_width
        if "w2" in adapted:
            last = config.lora_rank or 0
        left += recomputed * 2 * shape.width * last
    if own.parallel and recomputed and adapted and not adapted & {"w1", "w2", "output_proj"}:
        # In the first layer, neither the embeddings' path through the feed-forward half nor
        # attention's projections have a gradient.
        left += 2 * shape.width * (shape.feed_forward_width + decoder.queries)
    return left


def _all_adapters(decoder: DecoderParameters, config: TrainingConfig) -> int:
    """Return the adapters' cost of a token in all layers, forward."""
    rank = config.lora_rank or 0
    return sum(2 * rank * (before + behind) for before, behind in adapted_shapes(decoder, config))


def adapter_numbers(decoder: DecoderParameters, config: TrainingConfig) -> int:
    """Count the numbers low-rank adapters read and write for a token of a training step: memory
    traffic takes the time, as their products have few operations. Of a matrix's input and output,
    and of their gradients, one by one:

    - forward, B(A x): x is read; B's product is written, scaled (read, written) and added (two
      read, one written);
    - backward: the product's gradient is scaled (read, written) and read for A and B each; x is
      read for A's gradient; x's own is written and added to that of the frozen matrix (two read,
      one written).
    """
    return sum(6 * before + 10 * behind for before, behind in adapted_shapes(decoder, config))


def _layer_with_adapters(
    decoder: DecoderParameters, config: TrainingConfig, rank: int, reached: bool
) -> tuple[int, int, bool]:
    """Count a layer's cost beyond its forward pass without adapters: operations for each token,
    attention's products back (of two forward), and whether its output has a gradient. `reached`:
    whether its input has one.
    """
    shapes = decoder.matrix_shapes
    total = 0

    def matrix(name: str, input_grad: bool) -> bool:
        """Count one matrix; return whether its result has a gradient."""
        nonlocal total
        if name not in shapes:
            return False
        before, behind = shapes[name]
        if input_grad:
            total += 2 * before * behind
        if name not in config.lora_targets:
            return input_grad
        total += 2 * rank * (before + behind)  # forward
        total += 2 * rank * (before + 2 * behind + (before if input_grad else 0))
        return True

    q, k, v = (matrix(name, reached) for name in ("q_proj", "k_proj", "v_proj"))
    products = (q or k) + q + k + v  # gradients of attention's weights, queries, keys, values
    attended = matrix("output_proj", q or k or v)
    # Two halves with the same input.
    if decoder.own is not None and decoder.own.parallel:
        feed_forward_input = reached
    else:
        feed_forward_input = reached or attended
    gates = [matrix(name, feed_forward_input) for name in ("w1", "w3")]
    fed = matrix("w2", any(gates))
    return total, int(products), reached or attended or fed

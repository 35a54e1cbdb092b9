"""Floating-point operations of a pass forward and back, where not all weights are trained. Needs nothing but Python.

With adapters of low rank (`Settings.lora_rank`) the model's own matrices have no gradient: each costs a product forward and,
where what it reads has a gradient, one back. An adapter costs what any two trained matrices of its size cost. The first layer
reads embeddings, which are frozen too: what nothing trained comes before is not gone back through.

Left out beside what `ttrl.costs.flops` leaves out: products of an adapter's two matrices (DoRA's row lengths, a merged head),
which are made once in a pass however many tokens it has.
"""

from collections.abc import Mapping

from ttrl.costs.flops import Flops, forward_flops
from ttrl.costs.parameters import DecoderParameters
from ttrl.costs.training_settings import Settings


def pass_flops(
    decoder: DecoderParameters, settings: Settings, tokens: int, pairs: Mapping[int | None, int], head_positions: int
) -> Flops:
    """Of a forward and a backward pass: arguments as those of `ttrl.costs.flops.forward_flops`."""
    shape = decoder.shape
    forward = forward_flops(shape, tokens, pairs, head_positions)
    if settings.lora_rank is None:
        return forward * 3
    layers, attention, reached = forward.layers, forward.attention, False
    for window in shape.windows:
        one_product = 2 * shape.heads * shape.head_dim * pairs[window]
        layer, products, reached = _layer(decoder, settings, reached)
        layers += tokens * layer
        attention += one_product * products
    head = forward.head * (2 if reached else 1)
    if "output" in settings.lora_targets and not decoder.tied:
        head += forward.head  # of the merged matrix, which its adapter's gradient is made of
    return Flops(layers, attention, head)


def _layer(decoder: DecoderParameters, settings: Settings, reached: bool) -> tuple[int, int, bool]:
    """Beyond a layer's forward pass without adapters: operations for each token, products of attention back (of two forward), and
    whether what comes out has a gradient. reached: whether what goes in has one."""
    rank, targets, shapes = settings.lora_rank, settings.lora_targets, decoder.matrix_shapes
    assert rank is not None
    total = 0

    def matrix(name: str, input_grad: bool) -> bool:
        """Counts one; True where its result has a gradient."""
        nonlocal total
        if name not in shapes:
            return False
        before, behind = shapes[name]
        if input_grad:
            total += 2 * before * behind
        if name not in targets:
            return input_grad
        total += 2 * rank * (before + behind)  # forward
        total += 2 * rank * (before + 2 * behind + (before if input_grad else 0))
        return True

    q, k, v = (matrix(name, reached) for name in ("q_proj", "k_proj", "v_proj"))
    products = (q or k) + q + k + v  # gradients of attention's weights, of queries, of keys, of values
    attended = matrix("output_proj", q or k or v)
    feed_forward_input = reached if decoder.family == "phi" else reached or attended  # Phi's two halves are beside each other
    gates = [matrix(name, feed_forward_input) for name in ("w1", "w3")]
    fed = matrix("w2", any(gates))
    return total, int(products), reached or attended or fed

"""Adapters of low rank for frozen matrices.

    LoRA (arXiv 2106.09685)   y = W x + b + s·B A x                        s = α / r
    DoRA (arXiv 2402.09353)   y = (m / ‖W + s·B A‖)·(W x + s·B A x) + b    norms of rows, treated as constants (section 4.3)

QLoRA (arXiv 2305.14314) is either with W in 4 bits. torchtune's modules of the same names are not used: its DoRA multiplies the
bias too (peft does not) and builds an identity matrix of the model's width in each pass, and dropout would also act in passes
without gradient, where log-probabilities are compared.

Shapes: D width in, O width out, r rank. NF4 has run on CPU; never run on a GPU.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.dtypes.nf4tensor import NF4Tensor, linear_nf4, to_nf4

from ttrl.configs import TrainingConfig
from ttrl.configs.recipe import NF4_BLOCK
from ttrl.errors import ConfigError

ADAPTER_PARTS = ("lora_a", "lora_b", "magnitude")
_SCALE_BLOCK = 256  # scales of blocks that share a scale of their own


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with ADAPTER_PARTS: lora_a [r, D], lora_b [O, r], and for DoRA magnitude [O]."""

    def __init__(self, frozen: nn.Linear, config: TrainingConfig) -> None:
        nn.Module.__init__(self)
        assert config.lora_rank is not None
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.weight, self.bias = frozen.weight, frozen.bias
        weight = frozen.weight
        self.lora_a = nn.Parameter(weight.new_empty(config.lora_rank, self.in_features))
        self.lora_b = nn.Parameter(weight.new_empty(self.out_features, config.lora_rank))
        self.magnitude = nn.Parameter(weight.new_empty(self.out_features)) if config.lora_kind == "dora" else None
        self.scaling = config.lora_alpha / config.lora_rank
        self.dropout = config.lora_dropout
        self.enabled = True
        """False: as if there were no adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Map x [..., D] → [..., O]."""
        bias = self.bias if self.magnitude is None or not self.enabled else None
        if isinstance(self.weight, NF4Tensor):
            base: Tensor = linear_nf4(input, self.weight)
            base = base if bias is None else (base + bias).to(base.dtype)
        else:
            base = F.linear(input, self.weight, bias)
        if not self.enabled:
            return base
        # Passes without a gradient measure what the model computes.
        x = F.dropout(input, self.dropout) if self.dropout and torch.is_grad_enabled() else input
        out = base + self.scaling * F.linear(F.linear(x, self.lora_a), self.lora_b)
        if self.magnitude is None:
            return out
        # In bf16, scales near 1 would ignore a change of the magnitude below 0.4%, which merged matrices do not.
        scaled = out * self._row_scales(self.weight)
        return (scaled if self.bias is None else scaled + self.bias).to(out.dtype)

    def _row_scales(self, weight: Tensor) -> Tensor:
        """Return m / ‖W + s·B A‖, [O]; only m gets a gradient."""
        assert self.magnitude is not None
        with torch.no_grad(), torch.autocast(self.magnitude.device.type, enabled=False):
            lengths = _row_lengths(plain(weight) + self.scaling * (self.lora_b @ self.lora_a))
        return self.magnitude / lengths

    def merged(self, weight: Tensor) -> Tensor:
        """Return the matrix [O, D] that computes the same, from the frozen one; differentiable in the adapter."""
        if not self.enabled:
            return weight
        return merge(weight, self.lora_a, self.lora_b, self.magnitude, self.scaling)

    def quantise(self, weight: Tensor) -> None:
        """Set `weight` [O, D] as the frozen matrix, in 4 bits."""
        blocks = weight.numel() // NF4_BLOCK
        quantised = to_nf4(weight.detach(), NF4_BLOCK, next(n for n in range(_SCALE_BLOCK, 0, -1) if blocks % n == 0))
        self.weight = nn.Parameter(quantised, requires_grad=False)


def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor | None, scaling: float) -> Tensor:
    """Return W + s·B A, with DoRA's rows scaled to their length."""
    with torch.autocast(lora_a.device.type, enabled=False):
        changed = plain(weight) + scaling * (lora_b @ lora_a)
        if magnitude is None:
            return changed
        return changed * (magnitude / _row_lengths(changed.detach())).unsqueeze(1)


def _row_lengths(weight: Tensor) -> Tensor:
    """Return ‖W‖ of each row, [O]; above 0 for rows of zeros too, which stay zeros."""
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return lengths.clamp_min(torch.finfo(weight.dtype).tiny)


def plain(weight: Tensor) -> Tensor:
    """Return a matrix as the numbers to compute with; others than NF4 unchanged."""
    numbers: Tensor = weight.get_original_weight() if isinstance(weight, NF4Tensor) else weight
    return numbers


def apply_lora(decoder: nn.Module, config: TrainingConfig) -> None:
    """Freeze a decoder and put adapters on the matrices that the config names. Call it before sharding; on the meta device too:
    adapters hold nothing yet. Raises ConfigError where it has none of them, for a head that is the embedding, and for matrices
    that do not fit into 4 bits."""
    assert config.lora_rank is not None
    decoder.requires_grad_(False)
    found = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in config.lora_targets
    }
    if "output" in config.lora_targets and hasattr(decoder.output, "tied_module"):
        raise ConfigError(
            "config",
            ["lora_targets names 'output', but the model's head is its embedding (tie_word_embeddings), which stays frozen"],
        )
    if not found:
        raise ConfigError("config", [f"lora_targets is {', '.join(config.lora_targets)}, and the model has none of them"])
    if config.lora_base_dtype == "nf4":
        odd = [name for name, linear in found.items() if linear.weight.numel() % NF4_BLOCK]
        if odd:
            raise ConfigError(
                "config",
                [
                    f"lora_base_dtype is 'nf4', which holds blocks of {NF4_BLOCK} numbers, but {odd[0]} has "
                    f"{found[odd[0]].weight.numel()}; use 'fp32'"
                ],
            )
    for name, linear in found.items():
        parent, _, last = name.rpartition(".")
        setattr(decoder.get_submodule(parent), last, AdaptedLinear(linear, config))
    if config.lora_base_dtype == "bf16":
        for parameter in (p for name, p in decoder.named_parameters() if not is_adapter(name)):
            parameter.data = parameter.data.bfloat16()


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTER_PARTS


def adapted(module: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers with adapters, by the names that their parameters have in `Policy.parameters_by_name`."""
    return {
        name.removeprefix("decoder.").replace("_checkpoint_wrapped_module.", ""): layer
        for name, layer in module.named_modules()
        if isinstance(layer, AdaptedLinear)
    }


@contextlib.contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Switch adapters off inside the block, so that the frozen base is computed."""
    layers = adapted(module).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True

"""Add adapters of low rank to frozen matrices.

    LoRA (arXiv 2106.09685)   y = W x + b + s·B A x                        s = α / r
    DoRA (arXiv 2402.09353)   y = (m / ‖W + s·B A‖)·(W x + s·B A x) + b
                              (norms of rows, treated as constants: section 4.3)

QLoRA (arXiv 2305.14314) is either with W in 4 bits. torchtune's modules of the same names are not
used: its DoRA multiplies the bias too (peft does not) and builds an identity matrix of the model's
width in each pass, and dropout would also act in passes without gradient, used to compare
log-probabilities.

Shapes: D width in, O width out, r rank. NF4 trains the same on a GPU as on the CPU, to 1e-6.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torchao.dtypes.nf4tensor import NF4Tensor, SubclassTensorArgs, linear_nf4, to_nf4

from ttrl.configs import TrainingConfig
from ttrl.configs.recipe import MATRIX_NAMES, NF4_BLOCK
from ttrl.errors import ConfigError
from ttrl.training.kernels.widening import NARROW, linear
from ttrl.training.models.transformers_decoder import TransformersDecoder
from ttrl.training.parallel.sharding import Share, local_part, place_of_part, with_partial_gradient

ADAPTER_PARTS = ("lora_a", "lora_b", "magnitude")
_SCALE_BLOCK = 256  # scales of blocks with a common scale of their own


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with ADAPTER_PARTS: lora_a [r, D], lora_b [O, r], and for DoRA
    magnitude [O].
    """

    def __init__(self, frozen: nn.Linear, config: TrainingConfig) -> None:
        nn.Module.__init__(self)
        assert config.lora_rank is not None
        self.in_features = frozen.in_features
        self.out_features = frozen.out_features
        self.weight = frozen.weight
        self.bias = frozen.bias
        weight = frozen.weight
        self.lora_a = nn.Parameter(weight.new_empty(config.lora_rank, self.in_features))
        self.lora_b = nn.Parameter(weight.new_empty(self.out_features, config.lora_rank))
        self.magnitude = (
            nn.Parameter(weight.new_empty(self.out_features))
            if config.lora_kind == "dora"
            else None
        )
        self.scaling = config.lora_alpha / config.lora_rank
        self.dropout = config.lora_dropout
        self.constant_lengths = True
        """False: DoRA's row lengths have a gradient, too, for exact derivatives."""
        self.share: Share | None = None
        """Set if tensor parallelism splits the layer."""
        self.enabled = True
        """False: as if there were no adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Map x [..., D] → [..., O]; under tensor parallelism, parts of either (`share`)."""
        share = self.share
        magnitude = self.magnitude if self.enabled else None
        weight = frozen_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias)
        x = input if share is None else share.entered(input)
        # Otherwise the bias must follow scaling or summing.
        early = magnitude is None and not (share is not None and share.rows)
        added = bias if early else None
        if isinstance(weight, NF4Tensor):
            out: Tensor = linear_nf4(x, weight)
            if added is not None:
                out = (out + added).to(out.dtype)
        else:
            out = linear(x, weight, added)
        if self.enabled:
            # Processes sharing the layer draw alike for a common input; with parts of it, they drop
            # the same places.
            if self._drops():
                x = F.dropout(x, self.dropout)
            lora_a, lora_b = self._adapter()
            out = out + self.scaling * linear(linear(x, lora_a), lora_b)
        if share is not None:
            out = share.summed(out)
        dtype = out.dtype
        if magnitude is not None:
            # In bf16, scales near 1 would ignore a change of the magnitude below 0.4%; merged
            # matrices do not.
            out = out * self._row_scales(weight, local_part(magnitude))
        if bias is not None and not early:
            out = out + bias
        out = out.to(dtype)
        if share is None:
            return out
        return share.left(out, self.out_features)

    def _drops(self) -> bool:
        """Tell whether this is a pass with dropout: passes without gradient measure the model's
        outputs.
        """
        return self.dropout > 0 and torch.is_grad_enabled()

    def _adapter(self) -> tuple[Tensor, Tensor]:
        """Return this process's parts of A and B. The replicated one gets a part of its gradient on
        each process.
        """
        if self.share is None:
            return self.lora_a, self.lora_b
        if self.share.rows:
            return local_part(self.lora_a), with_partial_gradient(self.lora_b)
        return with_partial_gradient(self.lora_a), local_part(self.lora_b)

    def _row_scales(self, weight: Tensor, magnitude: Tensor) -> Tensor:
        """Return m / ‖W + s·B A‖, [O]; only m gets a gradient while `constant_lengths`."""
        grad = torch.is_grad_enabled() and not self.constant_lengths
        with torch.set_grad_enabled(grad), torch.autocast(magnitude.device.type, enabled=False):
            lora_a, lora_b = self._adapter()
            changed = plain(weight) + self.scaling * (lora_b @ lora_a)
            lengths = _row_lengths(changed, None if self.share is None else self.share.lengths)
        return magnitude / lengths

    def merged(self, weight: Tensor) -> Tensor:
        """Return the equivalent matrix [O, D], from the frozen one, or its part of one split by
        columns; differentiable in the adapter."""
        if not self.enabled:
            return weight
        magnitude = None if self.magnitude is None else local_part(self.magnitude)
        how = (self.scaling, self.constant_lengths)
        return merge(weight, *self._adapter(), magnitude, *how)

    def quantise(self, weight: Tensor) -> None:
        """Set this process's part of `weight` [O, D] as the frozen matrix, in 4 bits: a part has
        the numbers of the whole.
        """
        blocks = weight.numel() // NF4_BLOCK
        whole = to_nf4(
            weight.detach(),
            NF4_BLOCK,
            next(n for n in range(_SCALE_BLOCK, 0, -1) if blocks % n == 0),
        )
        own: Tensor = whole
        if isinstance(self.weight, DTensor):
            own = DTensor(
                _part_in_four_bits(whole, *place_of_part(self.weight)),
                self.weight._spec,
                requires_grad=False,
            )
        self.weight = nn.Parameter(own, requires_grad=False)


def check_parts(layers: Mapping[str, AdaptedLinear]) -> None:
    """Raise ConfigError if processes would share a 4-bit matrix unevenly, or in the middle of a
    block.
    """
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            [placement], processes = layer.weight.placements, layer.weight.device_mesh.size()
            _check_parts(name, layer.weight.shape, processes, by_rows=placement == Shard(0))


def _check_parts(name: str, shape: Sequence[int], processes: int, by_rows: bool) -> None:
    height, width = shape
    side, block = (
        (height, NF4_BLOCK // math.gcd(NF4_BLOCK, width)) if by_rows else (width, NF4_BLOCK)
    )
    if side % (processes * block):
        problem = (
            f"lora_base_dtype is 'nf4', and {processes} processes would share {name} [{height}, "
            f"{width}] by its {'rows' if by_rows else 'columns'}, but their number is not a "
            f"multiple of {processes * block}; use fewer processes, or another lora_base_dtype"
        )
        raise ConfigError("config", [problem])


def _part_in_four_bits(whole: NF4Tensor, rows: slice, columns: slice) -> NF4Tensor:
    """Return a part of a matrix, with its blocks' codes and scales unchanged. It must begin and end
    with blocks.
    """
    width = whole.shape[1]
    size = (rows.stop - rows.start, columns.stop - columns.start)
    blocks = torch.arange(whole.numel() // NF4_BLOCK, device=whole.device)
    if size[1] == width:
        ends = [rows.start * width // NF4_BLOCK, rows.stop * width // NF4_BLOCK]
        blocks = blocks[ends[0] : ends[1]]
    else:
        ends = [columns.start // NF4_BLOCK, columns.stop // NF4_BLOCK, width // NF4_BLOCK]
        blocks = blocks.view(whole.shape[0], -1)[rows, ends[0] : ends[1]].flatten()
    # As many blocks have one scale of scales, here as in the whole.
    group = math.gcd(whole.scaler_block_size, *ends)
    about = SubclassTensorArgs(torch.Size(size), (size[1], 1), 0, whole.dtype, whole.device, False)
    return NF4Tensor(
        about,
        NF4_BLOCK,
        len(blocks),
        group,
        whole.quantized_scalers[blocks],
        whole.quantization_factor[blocks[::group] // whole.scaler_block_size],
        whole.scaler_mean,
        whole.quantized_data.view(-1, NF4_BLOCK // 2)[blocks].flatten(),
        whole.nf4,
    )


def merge(
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor | None,
    scaling: float,
    constant_lengths: bool = True,
) -> Tensor:
    """Return W + s·B A, with DoRA's rows scaled to length; a constant length has no gradient."""
    with torch.autocast(lora_a.device.type, enabled=False):
        changed = plain(weight) + scaling * (lora_b @ lora_a)
        if magnitude is None:
            return changed
        if constant_lengths:
            rows = changed.detach()
        else:
            rows = changed
        return changed * (magnitude / _row_lengths(rows)).unsqueeze(1)


def _row_lengths(weight: Tensor, of_parts: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return ‖W‖ of each row, [O]; above 0 for rows of zeros too, to keep them zeros. `of_parts`:
    makes it from those of parts.
    """
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=1)
    if of_parts is not None:
        lengths = of_parts(lengths)
    return lengths.clamp_min(torch.finfo(weight.dtype).tiny)


def plain(weight: Tensor) -> Tensor:
    """Return a matrix as the numbers to compute with, sharded as it is; others than NF4
    unchanged.
    """
    local = frozen_part(weight)
    if not isinstance(local, NF4Tensor):
        return weight
    numbers: Tensor = local.get_original_weight()
    if not isinstance(weight, DTensor):
        return numbers
    return DTensor.from_local(numbers, weight.device_mesh, weight.placements, run_check=False)


def frozen_part(weight: Tensor) -> Tensor:
    """Return this process's part of a matrix without gradient."""
    with torch.no_grad():
        return local_part(weight)


def apply_lora(decoder: nn.Module, config: TrainingConfig) -> None:
    """Freeze a decoder and put adapters on the matrices named by the config. Call it before
    sharding; on the meta device too: adapters hold nothing yet. Raises ConfigError if it has none
    of them, for a tied head, and for matrices unfit for 4 bits."""
    assert config.lora_rank is not None
    decoder.requires_grad_(False)
    wanted = set(config.lora_targets).union(*(MATRIX_NAMES[name] for name in config.lora_targets))
    found = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in wanted
    }
    if "output" in config.lora_targets and hasattr(decoder.output, "tied_module"):
        raise ConfigError(
            "config",
            [
                "lora_targets names 'output', but the model's head is its embedding "
                "(tie_word_embeddings) and stays frozen; leave 'output' out"
            ],
        )
    if not found:
        raise ConfigError(
            "config",
            [f"lora_targets is {', '.join(config.lora_targets)}, but the model has none of them"],
        )
    if config.lora_base_dtype == "nf4":
        odd = [name for name, linear in found.items() if linear.weight.numel() % NF4_BLOCK]
        if odd:
            raise ConfigError(
                "config",
                [
                    f"lora_base_dtype is 'nf4', with blocks of {NF4_BLOCK} numbers, but {odd[0]} "
                    f"has {found[odd[0]].weight.numel()}; leave lora_base_dtype out"
                ],
            )
    for name, frozen in found.items():
        parent, _, last = name.rpartition(".")
        setattr(decoder.get_submodule(parent), last, AdaptedLinear(frozen, config))


def hold_base(
    decoder: nn.Module, stored: Mapping[str, torch.dtype], config: TrainingConfig
) -> None:
    """Give a meta-device decoder's frozen parameters the dtypes of `lora_base_dtype`; `stored`
    holds the dtypes in their files. Call it after `apply_lora`."""
    if hasattr(decoder.output, "tied_module"):
        head = "tok_embeddings.weight"
    else:
        head = "output.weight"
    if config.lora_base_dtype == "nf4":
        in_four_bits = {f"{name}.weight" for name in adapted(decoder)}
    else:
        in_four_bits = set()
    products = [name for name, one in decoder.named_modules() if isinstance(one, nn.Linear)]
    linear = {f"{name}.{part}" for name in products for part in ("weight", "bias")}
    # Other modules of transformers' classes would compute in 16 bits if held in 16 bits.
    only_linear = config.dtype == "fp32" and isinstance(decoder, TransformersDecoder)
    for name, parameter in decoder.named_parameters():
        if is_adapter(name) or name in in_four_bits:
            continue
        if only_linear and name not in linear:
            continue
        dtype = torch.float32
        if config.lora_base_dtype == "bf16":
            dtype = torch.bfloat16
        # An fp32 pass needs the whole head in fp32 at once: both copies would take more than the
        # wide one.
        elif config.lora_base_dtype != "fp32" and not (config.dtype == "fp32" and name == head):
            dtype = stored.get(name, dtype)
        if dtype in NARROW:
            parameter.data = parameter.data.to(dtype)


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTER_PARTS


def adapted(module: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers with adapters, by their parameter names in `Policy.parameters_by_name`."""
    return {
        name.removeprefix("decoder.").replace("_checkpoint_wrapped_module.", ""): layer
        for name, layer in module.named_modules()
        if isinstance(layer, AdaptedLinear)
    }


@contextlib.contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Switch adapters off inside the block, to compute the frozen base."""
    layers = adapted(module).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True

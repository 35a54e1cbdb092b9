"""Train transformers' own model classes, unmodified: attention and recurrences are plugged in from
outside.

A class is built without its head. It gets positions and no mask. It attends by calling
`attend_packed` through transformers' attention interface. For scans and convolutions over tokens,
this file replaces the module's function by one aware of packed groups
(`ttrl.training.kernels.branching`). Everything else of a model looks at one token at a time, and
sees the packed row as it is.

The functions find the rows of the current pass in `_now`. A hook sets it before each layer, also
for recomputation in the backward pass.

Shapes: B rows, T tokens, D width, H query heads, K key/value heads, E dimension of a head. Has
never run on a GPU.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig

from ttrl.training.kernels.attention import AttentionPlan, attend
from ttrl.training.kernels.branching import (
    Branches,
    Scan,
    branches_of,
    branching_convolution,
    branching_scan,
)
from ttrl.training.kernels.doubles import KeepDoubles
from ttrl.training.kernels.widening import Linear, TiedLinear, widened
from ttrl.training.models.expert_routing import Routing
from ttrl.training.models.layouts import Layout, whole_model

ATTENTION = "ttrl"
"""The name of `attend_packed` in transformers."""
_DELTA_RULE = Scan(
    ("query", "key", "value", "g", "beta"), "initial_state", "output_final_state", fill={}
)
SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    # Softplus of -inf is 0: the token takes no time, unless time has a lower limit.
    "mamba2_chunk_scan": Scan(
        ("hidden_states", "dt", "B", "C"),
        "initial_states",
        "return_final_states",
        fill={"dt": -torch.inf},
        always_two=False,
    ),
}
"""Functions of transformers' modules along the tokens, by name."""
CONVOLUTION = "causal_conv1d_fn"


@dataclass(eq=False)
class Rows:
    """The packed rows of a pass."""

    plan: AttentionPlan
    wide: bool = False
    """Whether everything is to be computed in float64."""
    experts: Tensor | None = None
    """The sampler's experts [B, T, L, K], -1 for unknown; None: each router chooses."""

    @functools.cached_property
    def is_token(self) -> Tensor:
        """Return [B, T], False in padding."""
        return self.plan.group_ids >= 0

    @functools.cached_property
    def branches(self) -> Branches:
        """Return their groups."""
        return branches_of(self.plan.group_ids, self.plan.parent_ids)


_ROWS = "ttrl_rows"


class _Now:
    """The rows of the current pass; None outside of a decoder's layers."""

    rows: Rows | None = None
    doubles: ExitStack | None = None


_now = _Now()


class TransformersDecoder(nn.Module):
    """A model class of transformers, from packed rows to hidden states. Dropout is never applied.

    Its parameters have the names of the class, but for those common to all decoders:
    tok_embeddings, layers.0 … and output."""

    tok_embeddings: nn.Embedding
    layers: nn.ModuleList

    def __init__(self, config: PretrainedConfig, context: int | None = None) -> None:
        super().__init__()
        whole = whole_model(config, attn_implementation=ATTENTION)
        plug_in(sys.modules[type(whole).__module__])
        self.layout = Layout(whole)
        base: Any = whole.base_model
        self._base = (base,)  # in a tuple, as its parts have our names
        for name, child in base.named_children():
            self.add_module(self.layout.names.parts.get(name, name), child)
        self.tok_embeddings.padding_idx = None  # else a pad token in a text has no gradient
        self.tok_embeddings.register_forward_hook(_widen)
        head: Any = whole.get_output_embeddings()
        if config.tie_word_embeddings:
            self.output = TiedLinear(self.tok_embeddings)
        else:
            self.output = head
        _freeze_buffers(self)
        _widen_products(self)
        self.config = config
        self.context = context
        self.max_seq_len: int = config.max_position_embeddings
        self.output_soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.output_scale = _output_scale(config)
        for layer in self.layers:
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)
        self.routing = Routing(self.layers, lambda: _now.rows)
        self.eval()

    def train(self, mode: bool = True) -> "TransformersDecoder":
        """Do nothing: trainer and sampler must compute the same model. In training mode, Mamba 2
        would also use kernels fusing several steps, without group boundaries."""
        return super().train(False)

    def hidden_states(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        plan: AttentionPlan,
        watch: Callable[[int, Tensor], None] | None = None,
        experts_BTLK: Tensor | None = None,
    ) -> Tensor:
        """Return final hidden states [B, T, D], normed and scaled, not yet projected to the
        vocabulary. watch: callback for each layer's number and output hidden states. experts_BTLK:
        the sampler's, -1 for unknown; None: each router chooses."""
        wide = self.tok_embeddings.weight.dtype is torch.float64
        if wide:
            self._base[0].config._experts_implementation = "eager"
        else:
            self._base[0].config._experts_implementation = "grouped_mm"
        with (
            self._handing_on(Rows(plan, wide, experts_BTLK), watch),
            KeepDoubles() if wide else nullcontext(),
        ):
            out = self._base[0](
                input_ids=tokens_BT, position_ids=positions_BT, attention_mask=None, use_cache=False
            )
        h: Tensor = out.last_hidden_state
        if self.output_scale == 1.0:
            return h
        return h * self.output_scale

    @contextmanager
    def _handing_on(
        self, rows: Rows, watch: Callable[[int, Tensor], None] | None
    ) -> Iterator[None]:
        """Pass the rows to each layer as an argument: checkpointing keeps arguments for
        recomputation."""

        def give(module: nn.Module, given: Any, named: Mapping[str, Any]) -> Any:
            return given, {**named, _ROWS: rows}

        def tell(number: int, module: nn.Module, given: Any, out: Any) -> None:
            assert watch is not None
            watch(number, out[0] if isinstance(out, tuple) else out)

        with ExitStack() as hooks:
            for number, layer in enumerate(self.layers):
                hook = layer.register_forward_pre_hook(give, prepend=True, with_kwargs=True)
                hooks.callback(hook.remove)
                if watch is not None:
                    hooks.callback(
                        layer.register_forward_hook(functools.partial(tell, number)).remove
                    )
            yield

    def logits(self, h: Tensor) -> Tensor:
        """Map hidden states [..., D] → logits [..., V] in fp32 or wider, capped if the model does
        so.
        """
        logits: Tensor = self.output(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.output_soft_cap
        if cap is None:
            return logits
        return torch.tanh(logits / cap) * cap

    def materialise_buffers(self, device: torch.device | str) -> None:
        """Compute on `device` a meta-device decoder's buffers, as transformers does after loading
        weights. Leaves parameters as they are."""

        def give(tensor: Tensor) -> Tensor:
            is_buffer = tensor.is_meta and not isinstance(tensor, nn.Parameter)
            if is_buffer:
                return torch.empty_like(tensor, device=device)
            return tensor

        (base,) = self._base
        base._apply(give)
        for parameter in base.parameters():
            parameter._is_hf_initialized = True
        for module in base.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        base.initialize_weights()


def _freeze_buffers(decoder: nn.Module) -> None:
    """Turn buffers stored in checkpoints, such as the routers' balancing biases, into parameters
    without a gradient."""
    for module in decoder.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _widen_products(decoder: nn.Module) -> None:
    """Let linear layers compute with weights held in 16 bits."""
    for module in decoder.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def _widen(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    """Let layers add up in fp32, even if embeddings are held or gathered in 16 bits."""
    return widened(out)


def _output_scale(config: PretrainedConfig) -> float:
    """Return a model's factor on its logits (Granite, Cohere, Falcon-H1)."""
    scale: float = 1.0 / getattr(config, "logits_scaling", 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(config, name, 1.0)
    return scale


def _enter(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    rows = named.pop(_ROWS)
    _now.rows = rows
    if rows.wide:  # also during recomputation, outside any other block
        _now.doubles = ExitStack()
        _now.doubles.enter_context(KeepDoubles())
    return given, named


def _leave(module: nn.Module, given: Any, out: Any) -> None:
    if _now.doubles is not None:
        _now.doubles.close()
    _now.rows = _now.doubles = None


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as a function of transformers' attention interface. query [B, H, T, E], key and value
    [B, K, T, E], values also narrower → [B, T, H, E], and no probabilities."""
    assert _now.rows is not None, "attention outside of a decoder's layers"
    width = value.shape[-1]
    wide = F.pad(value, (0, query.shape[-1] - width))
    out = attend(
        query,
        key,
        wide,
        _now.rows.plan,
        scale=scaling,
        soft_cap=softcap,
        window=sliding_window,
        sinks_H=s_aux,
    )
    return out[..., :width].transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend_packed)


def plug_in(modeling: Any) -> None:
    """Replace, once, a transformers module's functions along the tokens. Without packed rows they
    behave as before."""
    for name, scan in SCANS.items():
        _replace(modeling, name, functools.partial(_scan_or_branch, scan=scan))
    _replace(modeling, CONVOLUTION, _convolve_or_branch)


def _replace(modeling: Any, name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(modeling, name, None)
    if theirs is None or hasattr(theirs, "ttrl_replaces"):
        return
    replacement = functools.wraps(theirs)(functools.partial(ours, theirs))
    replacement.ttrl_replaces = theirs  # type: ignore[attr-defined]
    setattr(modeling, name, replacement)


def _scan_or_branch(theirs: Callable[..., Any], *given: Any, scan: Scan, **named: Any) -> Any:
    if _now.rows is None:
        return theirs(*given, **named)
    bound = inspect.signature(theirs).bind(*given, **named).arguments
    arguments = bound | bound.pop("kwargs", {})
    lowest, _ = arguments.get("dt_limit", (0.0, None))
    scan = scan._replace(fill=None) if lowest > 0 else scan
    out = branching_scan(theirs, scan, arguments, _now.rows.branches)
    if scan.always_two:
        return (out, None)
    return out


def _convolve_or_branch(
    theirs: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **named: Any,
) -> Tensor:
    if _now.rows is None:
        return theirs(hidden_states, weight, bias, **named)
    return branching_convolution(
        theirs, hidden_states, weight, _now.rows.branches, bias=bias, **named
    )

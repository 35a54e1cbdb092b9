"""Define the policy of both recipes: a decoder from packed rows to their labels' log-probabilities.

Everything happens inside one `forward`: FSDP's hooks on the root must see embeddings, norm and
output projection in use. Shapes: B rows, T tokens, N trained positions (in row-major order), D
width, V vocabulary.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from ttrl.errors import StorageError
from ttrl.training.kernels.attention import attention_plan
from ttrl.training.kernels.logprobs import IGNORE, Apart, ReferenceHead, TokenLoss, run_head
from ttrl.training.models.architecture import (
    Chosen,
    check_same_architecture,
    read_config,
    uses_transformers,
)
from ttrl.training.models.decoder import Decoder
from ttrl.training.models.transformers_decoder import TransformersDecoder
from ttrl.training.models.weights import check_weights, iter_weights
from ttrl.training.parallel.host_memory import HostMemory
from ttrl.training.parallel.sharding import copy_whole, full_tensor, local_part
from ttrl.training.policy.lora import AdaptedLinear, adapted, plain
from ttrl.training.policy.value_head import ValueHead

logger = logging.getLogger("ttrl.training")


@dataclass(frozen=True)
class HeadOptions:
    """Requested outputs at labels, besides log-probabilities and entropies. The first five:
    `ttrl.training.kernels.logprobs.run_head`."""

    token_loss: TokenLoss | None = None
    reference: ReferenceHead | None = None
    """With the whole output projection, also under tensor parallelism."""
    entropy_grad: bool = False
    divergence_grad: bool = False
    apart: Apart | None = None
    value_head: ValueHead | None = None
    """A value for each position."""
    hidden: bool = False
    """The hidden states, and nothing else."""
    trained: Tensor | None = None
    """The label positions, int64 [N], rows laid end to end; None: looked up, and the CPU waits for
    the device.
    """
    watch: Callable[[Tensor], None] | None = None
    """Callback for the hidden states [N, D], in passes computing log-probabilities."""
    watch_layers: Callable[[int, Tensor], None] | None = None
    """Callback for each layer's number and output hidden states [B, T, D]."""
    distributions: bool = False
    """Whole distributions at temperature 1 [N, V] in the place of log-probabilities, and nothing
    else: for a few positions.
    """


class PolicyOutput(NamedTuple):
    """A policy's outputs at the N labels, in row-major order. A tuple, to let FSDP find its
    tensors.
    """

    logprobs: Tensor
    """[N], nats."""
    entropy: Tensor
    """[N], nats."""
    divergence: Tensor | None = None
    """[N]: KL to the reference over the whole vocabulary."""
    loss: Tensor | None = None
    """Σ of the weighted token losses, for the backward pass."""
    values: Tensor | None = None
    """[N], of the value head."""
    hidden: Tensor | None = None
    """[N, D]"""


class Policy(nn.Module):
    """A decoder with its head. Matrix products run in `compute_dtype`; parameters keep their own
    dtype. `temperature` is the sampler's: log-probabilities are those of its distribution.
    `num_output_chunks`: None leaves the chunks to the head."""

    def __init__(
        self,
        decoder: Decoder | TransformersDecoder,
        *,
        num_output_chunks: int | None = None,
        compute_dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.num_output_chunks = num_output_chunks
        self.compute_dtype = compute_dtype
        self.temperature = temperature
        self.vocab_group: ProcessGroup | None = None
        """Under tensor parallelism, the processes sharing the vocabulary."""
        self.host_memory: HostMemory | None = None
        """This process's block for parked tensors in the CPU's memory; None for a policy without
        parking.
        """

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        group_ids_BT: Tensor,
        parent_ids_BT: Tensor,
        input_pos_BT: Tensor,
        options: HeadOptions = HeadOptions(),
        experts_BTLK: Tensor | None = None,
    ) -> PolicyOutput:
        """Map packed rows to the head's outputs at the labels, each at its predicting position.

        experts_BTLK: the sampler's experts of each layer, -1 for unknown
            (`ttrl.training.models.expert_routing`).
        """
        lower = self.compute_dtype not in (torch.float32, torch.float64)
        # Its cache would keep a copy of every trained weight until the pass ends, although each is
        # used once.
        lowered = functools.partial(
            torch.autocast, tokens_BT.device.type, self.compute_dtype, cache_enabled=False
        )
        with lowered() if lower else contextlib.nullcontext():
            plan = attention_plan(group_ids_BT, parent_ids_BT, input_pos_BT, self.compute_dtype)
            if experts_BTLK is None:
                replay = {}
            else:
                replay = {"experts_BTLK": experts_BTLK}
            h_BTD = self.decoder.hidden_states(
                tokens_BT, input_pos_BT, plan, options.watch_layers, **replay
            )
            trained_N = options.trained
            if trained_N is None:
                trained_N = (labels_BT.flatten() != IGNORE).nonzero().squeeze(1)
            return self._head(
                h_BTD.flatten(0, 1)[trained_N], labels_BT.flatten()[trained_N], options
            )

    def _head(self, h_ND: Tensor, labels_N: Tensor, options: HeadOptions) -> PolicyOutput:
        nothing = h_ND.new_zeros(0)
        if options.hidden:
            return PolicyOutput(nothing, nothing, hidden=h_ND)
        if options.distributions:  # their entropies would take twice their memory once more
            return PolicyOutput(
                torch.log_softmax(self.decoder.logits(h_ND).float(), dim=-1), nothing
            )
        if options.watch is not None:
            options.watch(h_ND)
        out = run_head(
            h_ND,
            labels_N,
            self.head_weight(),
            num_chunks=self.num_output_chunks,
            temperature=self.temperature,
            soft_cap=self.decoder.output_soft_cap,
            bias_V=self.head_bias(),
            reference=self._own_part(options.reference),
            entropy_grad=options.entropy_grad,
            divergence_grad=options.divergence_grad,
            token_loss=options.token_loss,
            apart=options.apart,
            vocab_group=self.vocab_group,
        )
        if options.value_head is None:
            values = None
        else:
            values = options.value_head(h_ND)
        return PolicyOutput(out.logprobs_N, out.entropy_N, out.divergence_N, out.loss, values)

    def head_weight(self) -> Tensor:
        """Return the output projection [V, D] inside a forward pass, this rank's rows of it; the
        gradient flows through.
        """
        output: Any = self.decoder.output
        weight = local_part(getattr(output, "tied_module", output).weight)
        if isinstance(output, AdaptedLinear):
            return output.merged(weight)
        return weight

    def head_bias(self) -> Tensor | None:
        """Return the bias of the output projection [V], as `head_weight`; None if it has none."""
        output = self.decoder.output
        bias = getattr(getattr(output, "tied_module", output), "bias", None)
        if bias is None:
            return None
        return local_part(bias)

    def whole_head(self) -> tuple[Tensor, Tensor | None]:
        """Return whole copies of the output projection [V, D] and its bias, outside of a forward
        pass. A collective.
        """
        names = self.parameters_by_name()
        weight = names["output.weight" if "output.weight" in names else "tok_embeddings.weight"]
        bias = names.get("output.bias")
        return full_tensor(weight.detach()).clone(), None if bias is None else full_tensor(
            bias.detach()
        ).clone()

    def _own_part(self, reference: ReferenceHead | None) -> ReferenceHead | None:
        """Return this rank's rows of the reference's output projection, under tensor
        parallelism.
        """
        if reference is None or self.vocab_group is None:
            return reference
        size = self.vocab_group.size()
        rank = self.vocab_group.rank()
        bias = reference.bias_ref_V
        return ReferenceHead(
            reference.h_ref_ND,
            reference.weight_ref_VD.chunk(size)[rank],
            None if bias is None else bias.chunk(size)[rank],
        )

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return parameters under torchtune's names; a tied weight appears once. Sharded ones are
        the shards, even if a forward pass without a backward pass left parameters whole.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {
            name.removeprefix("decoder.").replace("_checkpoint_wrapped_module.", ""): p
            for name, p in self.named_parameters()
        }

    def full_weights(self) -> dict[str, Tensor]:
        """Return whole parameters on the CPU under torchtune's names; a collective if sharded: all
        ranks must call it.
        """
        return {
            name: full_tensor(plain(parameter.detach())).cpu()
            for name, parameter in self.parameters_by_name().items()
        }

    def set_aside(self, folder: str | Path | None) -> Callable[[], None]:
        """Copy all weights, those of `folder`, into the CPU's memory, and return a function to
        restore them; with too little memory, it reads the folder. None: no file has them. Both are
        collectives if sharded. Raises StorageError for None.
        """
        memory = self.host_memory
        parts = [local_part(parameter.detach()) for parameter in self.parameters_by_name().values()]
        if folder is not None and memory is None:
            return functools.partial(self.load_folder, folder)
        try:
            if memory is None:
                copies = [part.to("cpu", copy=True) for part in parts]
            else:
                copies = memory.hold(parts)
        except StorageError as error:
            if folder is None:
                raise
            logger.info(
                "the trainer will read the policy's own weights again from %s: %s", folder, error
            )
            return functools.partial(self.load_folder, folder)

        def put_back() -> None:
            for parameter, copy in zip(self.parameters_by_name().values(), copies, strict=True):
                local_part(parameter.detach()).copy_(copy, non_blocking=True)
            if memory is not None:
                memory.let_go()

        return put_back

    def widen(self, dtype: torch.dtype) -> None:
        """Hold all parameters in `dtype`, fp32 or wider, and compute in it. Their values do not
        change, not even in 4 bits. For unsharded policies."""
        for layer in adapted(self).values():
            numbers = plain(layer.weight)
            if numbers is not layer.weight:
                layer.weight = nn.Parameter(numbers, requires_grad=False)
        self.to(dtype)
        self.compute_dtype = dtype

    def load_folder(self, folder: str | Path) -> None:
        """Replace all weights by those of another folder of the same architecture; sharded policies
        keep each rank's part. Raises ModelFolderError if the folder's config describes another
        computation.
        """
        chosen = self.chosen_decoder
        check_same_architecture(read_config(folder, chosen), self.decoder.config, folder)
        fill_parameters(self.parameters_by_name(), folder, decoder=chosen)

    @property
    def chosen_decoder(self) -> Chosen:
        """Return the source of the policy's decoder code."""
        if uses_transformers(self.decoder.config):
            return "transformers"
        return "torchtune"


def fill_parameters(
    parameters: Mapping[str, nn.Parameter],
    folder: str | Path,
    put: Callable[[Tensor, Tensor], None] = copy_whole,
    decoder: Chosen = "auto",
) -> None:
    """Copy the weights of a folder into parameters under torchtune's names, sharded or not, tensor
    by tensor; `put` copies one. Raises ModelFolderError with missing names, unknown names and other
    shapes; the parameters are of no use then.
    """
    seen: dict[str, Tensor] = {}
    for name, weight in iter_weights(folder, decoder):
        seen[name] = torch.empty(weight.shape, device="meta")
        if name in parameters and parameters[name].shape == weight.shape:
            put(parameters[name], weight)
    check_weights(parameters, seen, folder)

"""The policy that both recipes train: a decoder that goes from packed rows to the log-probabilities of their labels.

Everything happens inside one `forward`, so that FSDP's hooks on the root see embeddings, norm and output projection being used.
Shapes: B rows, T tokens, N trained positions (in row-major order), D width, V vocabulary.
"""

import contextlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from ttrl.configs import TrainingConfig
from ttrl.training.attention import attention_mask
from ttrl.training.distributed import Ranks
from ttrl.training.logprobs import IGNORE, chunked_logprobs
from ttrl.training.models import (
    Decoder,
    build_decoder,
    check_same_architecture,
    check_weights,
    load_into,
    load_weights,
    read_config,
)


class Policy(nn.Module):
    """A decoder with its head. `compute_dtype` is what matrix products run in; parameters keep their own dtype. `temperature` is
    the sampler's: log-probabilities are those of the distribution that it drew from."""

    def __init__(
        self, decoder: Decoder, *, num_output_chunks: int, compute_dtype: torch.dtype = torch.float32, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.num_output_chunks = num_output_chunks
        self.compute_dtype = compute_dtype
        self.temperature = temperature

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        group_ids_BT: Tensor,
        parent_ids_BT: Tensor,
        input_pos_BT: Tensor,
        *,
        whole_distributions: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Packed rows → (log-probabilities [N], entropies [N]) at the positions whose label is not -100.

        `labels` stand at the position that predicts them. With `whole_distributions`, the first is [N, V], at
        temperature 1: for a few positions.
        """
        lower = self.compute_dtype not in (torch.float32, torch.float64)
        with torch.autocast(tokens_BT.device.type, self.compute_dtype) if lower else contextlib.nullcontext():
            mask = attention_mask(group_ids_BT, parent_ids_BT, self.compute_dtype)
            h_BTD = self.decoder.hidden_states(tokens_BT, input_pos_BT, mask)
            trained_BT = labels_BT != IGNORE
            h_ND, labels_N = h_BTD[trained_BT], labels_BT[trained_BT]
            if whole_distributions:
                logprobs_NV = torch.log_softmax(self.decoder.output(h_ND).float(), dim=-1)
                return logprobs_NV, -(logprobs_NV.exp() * logprobs_NV).sum(-1)
            return chunked_logprobs(h_ND, labels_N, self.decoder.output, self.num_output_chunks, self.temperature)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters under torchtune's names; a tied weight appears once. Sharded ones are the shards, also right after a forward
        pass without a backward pass, which leaves the root's parameters whole."""
        if isinstance(self, FSDPModule):
            self.reshard()
        return {
            name.removeprefix("decoder.").replace("_checkpoint_wrapped_module.", ""): p for name, p in self.named_parameters()
        }

    def full_weights(self) -> dict[str, Tensor]:
        """Whole parameters on the CPU under torchtune's names; a collective when sharded: all ranks must call it."""
        return {name: full_tensor(parameter.detach()).cpu() for name, parameter in self.parameters_by_name().items()}

    def load_folder(self, folder: str | Path) -> None:
        """Replaces all weights by those of another folder of the same architecture; sharded policies keep each rank's part.

        Raises ModelFolderError where the folder's config computes anything else than this policy does.
        """
        config = read_config(folder)
        check_same_architecture(config, self.decoder.config, folder)
        weights = load_weights(folder, config.tie_word_embeddings)
        check_weights(self.parameters_by_name(), weights, folder)
        with torch.no_grad():
            for name, parameter in self.parameters_by_name().items():
                copy_whole(parameter, weights[name])


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; a collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into one that may be sharded."""
    if isinstance(target, torch.distributed.tensor.DTensor):
        whole = whole.to(device=target.device, dtype=target.dtype)
        target.copy_(torch.distributed.tensor.distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(whole)


def load_policy(config: TrainingConfig, ranks: Ranks) -> Policy:
    """The policy of `config.model` on this rank's device: fp32 parameters, sharded over the ranks where there are several.

    Raises ModelFolderError for folders that are missing, incomplete or of a family that is not supported.
    """
    hf_config = read_config(config.model)
    weights = load_weights(config.model, tied=hf_config.tie_word_embeddings)
    decoder = build_decoder(hf_config)
    load_into(decoder, weights, config.model)
    if config.activation_checkpointing:
        set_activation_checkpointing(decoder, auto_wrap_policy={TransformerSelfAttentionLayer})
    policy = Policy(
        decoder,
        num_output_chunks=config.num_output_chunks,
        compute_dtype=torch.bfloat16 if config.dtype == "bf16" else torch.float32,
        temperature=getattr(config, "temperature", 1.0),
    ).to(ranks.device)
    if ranks.world_size > 1:
        for layer in decoder.layers:
            fully_shard(layer)
        fully_shard(policy)
    return policy

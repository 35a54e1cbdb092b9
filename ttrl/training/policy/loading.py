"""Load a policy from a model folder onto its devices, never holding the model more than once.

The decoder is built without memory (on the meta device), spread over the processes, and only then
given memory: each process's own part. Files are mapped, not read: a process touches the pages of
its part, tensor by tensor. A machine holds the model once, for any number of processes.
"""

from collections.abc import Callable

import torch

from ttrl.configs import TrainingConfig
from ttrl.errors import ConfigError
from ttrl.training.models.architecture import read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.models.transformers_decoder import TransformersDecoder
from ttrl.training.models.weights import iter_weights
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.parallel.host_memory import HostMemory
from ttrl.training.parallel.sharding import materialise, shard
from ttrl.training.policy.activation_memory import checkpoint_layers, offload_activations
from ttrl.training.policy.adapters import base_folder, fill_policy
from ttrl.training.policy.lora import adapted, apply_lora, check_parts, hold_base
from ttrl.training.policy.policy import Policy, fill_parameters


def load_policy(
    config: TrainingConfig, ranks: Ranks, spread: Callable[..., None] = shard
) -> Policy:
    """Load the policy of `config.model` on this rank's device, sharded if there are several ranks:
    parameters in fp32, a frozen base as `lora_base_dtype` says. Raises ModelFolderError for missing
    or incomplete folders and unsupported families.

    spread: spreads the policy over the ranks, as `shard` does.
    """
    base = base_folder(config)
    hf_config = read_config(base, config.decoder)
    with torch.device("meta"):
        decoder = build_decoder(hf_config, config.context)
        if config.lora_rank is not None:
            apply_lora(decoder, config)
    if isinstance(decoder, TransformersDecoder):
        _check_settings(config)
    if config.lora_rank is not None:
        hold_base(
            decoder,
            {name: weight.dtype for name, weight in iter_weights(base, config.decoder)},
            config,
        )
    policy = Policy(
        decoder,
        num_output_chunks=config.num_output_chunks,
        compute_dtype=torch.bfloat16 if config.dtype == "bf16" else torch.float32,
        temperature=getattr(config, "temperature", 1.0),
    )

    def wrap_layers() -> None:
        if config.compile:
            for layer in decoder.layers:
                layer.compile()
        if config.activation_checkpointing:
            checkpoint_layers(decoder.layers, config)

    spread(policy, config, ranks, wrap_layers)
    policy.host_memory = HostMemory(ranks)
    if config.lora_base_dtype == "nf4":
        in_four_bits = adapted(policy)
    else:
        in_four_bits = {}
    check_parts(in_four_bits)
    if config.cpu_offload:
        device = torch.device("cpu")
    else:
        device = ranks.device
    materialise(policy, device, but=[layer.weight for layer in in_four_bits.values()])
    decoder.materialise_buffers(ranks.device)
    if config.lora_rank is None:
        fill_parameters(policy.parameters_by_name(), base, decoder=config.decoder)
    else:
        fill_policy(policy, config, base)
        seed_dropout(config, ranks)
    if config.activation_offloading:
        offload_activations(decoder)
    return policy


def _check_settings(config: TrainingConfig) -> None:
    """Raise ConfigError with the settings not yet supported for transformers' classes."""
    problems = []
    whose = (
        "but only ttrl's own decoder supports it, and this model uses transformers' class (decoder)"
    )
    if config.tensor_parallel > 1:
        problems.append(
            f"tensor_parallel is {config.tensor_parallel}, {whose}: set it to 1 (FSDP2 shares "
            "the model as well)"
        )
    if config.compile:
        problems.append(f"compile is true, {whose}: set it to false")
    if problems:
        raise ConfigError("config", problems)


def seed_dropout(config: TrainingConfig, ranks: Ranks) -> None:
    """Seed the adapters' dropout by (seed, iteration, rank) only."""
    if config.lora_dropout:
        torch.manual_seed(
            derived_generator(
                config.seed, getattr(config, "iteration", 0), ranks.rank
            ).initial_seed()
        )

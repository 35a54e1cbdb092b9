"""Short trainings of tiny models in this process: gradients, steps, moved adapters, and the
distance of two results.
"""

import contextlib
import json
import math
from collections import Counter
from dataclasses import replace

import torch
from safetensors.torch import load_file
from support.parallel_worker import accumulate, gradients
from support.tiny_models import load_policy_in, random_samples
from torch import distributed

from ttrl.configs import TrainingConfig
from ttrl.costs.flops import forward_flops
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.facts import dumped
from ttrl.training.batches import updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.optimizer.optimizer import begin_step, clip_and_step, make_optimizer
from ttrl.training.optimizer.state import load_state, state_tensors
from ttrl.training.parallel.distributed import Ranks, grid
from ttrl.training.parallel.sharding import shard
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import adapted
from ttrl.training.trainer_canary import canary_tokens, compute_canary, half_precision

ALONE = Ranks(0, 1, torch.device("cpu"))


def start_and_moved(model, folder, here=ALONE):
    """(checkpoint of a model with its canary, checkpoint of the same with noise on every weight,
    that policy), in bf16.
    """
    start, moved = (folder / f"{number:04}" / "checkpoint" for number in (0, 1))
    start.mkdir(parents=True)
    for path in model.iterdir():
        (start / path.name).symlink_to(path)
    policy = load_policy(
        TrainingConfig(model=str(model), output_dir="", dtype="bf16", device=here.device.type), here
    )
    tokens = canary_tokens(
        start, policy.decoder.tok_embeddings.num_embeddings, policy.decoder.max_seq_len
    )
    cost = half_precision(policy, tokens, here.device)
    canary = replace(compute_canary(policy, here.device, start), half_precision=cost)
    (start / "canary.json").write_text(dumped(canary))
    generator = torch.Generator(here.device).manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            noise = torch.randn(weight.shape, generator=generator, device=here.device)
            weight.add_(noise, alpha=0.04 * weight.std().item())
    save_checkpoint(moved, policy, start, here)
    return start, moved, policy


def packed_rows():
    """Several rows of several lengths."""
    return packed_tensors_from_tokenized_results(
        random_samples(3, prompts=(3, 5, 8, 9, 4)), seq_len=40, pad_id=0
    )


def settings_of(folder, **settings):
    values = {
        "model": str(folder),
        "output_dir": "unused",
        "device": "cpu",
        "max_grad_norm": None,
        "rows_per_microbatch": 100,
    }
    return TrainingConfig.parse({**values, **settings}, "test")


def gradients_with(folder, packed, here=ALONE, spread=shard, **settings):
    """The gradient of a step, by parameter name."""
    config = settings_of(folder, **settings)
    policy = load_policy(config, here, spread)
    (step,) = updates(packed, 1, (0, 1), here, policy.decoder.config)
    accumulate(policy, step, config, here)
    return gradients(policy)


def distance(one, other):
    """‖one - other‖ / ‖other‖ over all parameters."""
    assert one.keys() == other.keys()
    square = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return math.sqrt(square / sum(float(value.double().square().sum()) for value in other.values()))


@contextlib.contextmanager
def group_of_one(tensor_parallel=1):
    """A process group with this process alone: what sharding does then must change nothing."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield grid(torch.device("cpu"), tensor_parallel)
    finally:
        distributed.destroy_process_group()


def trained(folder, packed, steps=1, state=None, **settings):
    """A policy and its optimizer after some steps, from a saved state where there is one."""
    config = settings_of(folder, lr=1e-3, **settings)
    policy = load_policy(config, ALONE)
    optimizer = make_optimizer(policy, config)
    first = load_state(state, policy, optimizer) if state else 0
    (step,) = updates(packed, 1, (0, 1), ALONE)
    for number in range(first, first + steps):
        begin_step(optimizer, config, number)
        accumulate(policy, step, config, ALONE)
        clip_and_step(policy, optimizer, config, number)
    return policy, optimizer


def tensors_of(policy, optimizer):
    return {name: tensor.clone() for name, tensor in state_tensors(policy, optimizer)}


def adapter_config(folder="unused", **settings):
    values = {
        "model": str(folder),
        "output_dir": "unused",
        "device": "cpu",
        "max_grad_norm": None,
        "rows_per_microbatch": 100,
    }
    return TrainingConfig.parse({**values, "lora_rank": 4, "lora_alpha": 6.0, **settings}, "test")


@torch.no_grad()
def move_adapters(policy, seed=1, size=0.1):
    """Away from where they change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted(policy).values():
        layer.lora_b.copy_(size * torch.randn(layer.lora_b.shape, generator=generator))
        if layer.magnitude is not None:
            layer.magnitude.mul_(1 + size * torch.rand(layer.magnitude.shape, generator=generator))
    return policy


def logprobs(policy, seed=0):
    """Of a plain row of random tokens."""
    row = torch.randint(90, (1, 12), generator=torch.Generator().manual_seed(seed))
    zeros = torch.zeros_like(row)
    return policy(row, row, zeros, zeros, torch.arange(12)[None]).logprobs


def adapter_gradients(folder, packed, here=ALONE, seed=None, **settings):
    """The gradient of a step, by parameter name."""
    config = adapter_config(folder, **settings)
    policy = (
        move_adapters(load_policy(config, here)) if here is ALONE else load_policy(config, here)
    )
    (step,) = updates(packed, 1, (0, 1), here, policy.decoder.config)
    if seed is not None:
        torch.manual_seed(seed)
    accumulate(policy, step, config, here)
    return gradients(policy)


def attention_pairs(positions, window=None):
    """Count the pairs of query and key that may see each other, for one head of one layer:
    `positions` are `input_pos` of all tokens that are not padding."""
    if window is None:
        return sum(position + 1 for position in positions)
    return sum(min(position + 1, window) for position in positions)


def training_flops(shape, positions, trained):
    """Count a forward and a backward pass over packed tokens, all weights trained: `positions` are
    `input_pos` of all tokens that are not padding, `trained` is the number of labels."""
    counts = Counter(positions)
    pairs = {
        window: sum(
            times * attention_pairs((position,), window) for position, times in counts.items()
        )
        for window in shape.layers_by_window
    }
    return forward_flops(shape, counts.total(), pairs, trained) * 3


def check_adapters(run, base):
    """Hold a run of two iterations to what one with adapters leaves: each goes on from the starting
    model and the last adapter, and its server was given that."""
    adapters = [run / "iterations" / f"000{number}" / "checkpoint" / "adapter" for number in (1, 2)]
    for folder in adapters:
        assert json.loads((folder / "ttrl_adapter.json").read_text())["lora_base"] == str(base)
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in adapters)
    assert first.keys() == second.keys() and all(
        not torch.equal(first[name], second[name]) for name in first
    )
    sync = json.loads((run / "iterations" / "0002" / "done" / "rollouts.json").read_text())[
        "facts"
    ]["sync"]
    assert (
        sync["mode"] == "adapter"
        and sync["fell_back"] is None
        and sync["canary_max_difference"] < 1e-4
    )
    # Merged at the end, for everybody else.
    assert load_file(adapters[1].parent / "model.safetensors")
    assert not (adapters[0].parent / "model.safetensors").exists()
    policy = load_policy(adapter_config(adapters[1].parent, lora_rank=4, lora_alpha=16.0), ALONE)
    frozen = load_policy_in(base, torch.float32).parameters_by_name()
    assert all(
        torch.equal(policy.parameters_by_name()[name], weight) for name, weight in frozen.items()
    )

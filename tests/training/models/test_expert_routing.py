"""Router replay: the trainer takes the sampler's experts, and counts where its routers would have
chosen others.
"""

import dataclasses

import check_models
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ttrl.errors import PackError, UserError
from ttrl.training.batches import replayed
from ttrl.training.models.expert_routing import routing_metrics

MIXTURES = (
    *(
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "mixtral",
        "gpt_oss",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
    ),
    *(
        "granite_moe",
        "granite_hybrid_moe",
        "lfm2_moe",
        "olmoe",
        "ernie4_5_moe",
        "hunyuan_moe",
        "minimax_m2",
    ),
    "kimi_linear",
)
SHOWN = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granite_hybrid_moe")
EXPERTS = 4


def identity(total):
    return total


def told(samples, layers, seed=0):
    """Give every token two experts of four at random, but for its last, of which no sampler tells
    them.
    """
    draw = np.random.default_rng(seed)
    found = []
    for sample in samples:
        shape = (len(sample.token_ids), layers)
        experts = draw.permuted(np.broadcast_to(np.arange(EXPERTS), (*shape, EXPERTS)), axis=-1)[
            ..., :2
        ].astype(np.int16)
        experts[-1] = -1
        found.append(dataclasses.replace(sample, experts=experts))
    # A prompt is stored once for its samples, so they agree about its tokens.
    for group in {one.task_id for one in found}:
        same = [one for one in found if one.task_id == group]
        for one in same:
            one.experts[: one.prompt_length] = same[0].experts[: one.prompt_length]
    return found


def force(model, sample):
    """Let each router of transformers' Qwen 3 MoE take the sample's experts, by the formula of its
    paper.
    """
    # Of the last, nothing is computed.
    experts = np.concatenate([sample.experts[:-1], np.zeros_like(sample.experts[:1])])
    for number, layer in enumerate(model.model.layers):
        router = layer.mlp.gate
        chosen = torch.tensor(experts[:, number]).long()

        def forward(hidden, router=router, chosen=chosen):
            logits = F.linear(hidden.flatten(0, -2), router.weight)
            weights = logits.softmax(-1).gather(-1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        router.forward = forward


def test_replayed_experts_are_computed_and_their_routers_trained(folder_of, one_thread):
    """Log-probabilities and gradients, the routers' too, are those of transformers with the same
    experts.
    """
    folder = folder_of("qwen3_moe")
    samples = told(
        check_models.samples(check_models.loaded(folder).decoder.config.vocab_size), layers=2
    )
    theirs, _ = check_models.one_by_one(folder, samples, force)
    policy = check_models.loaded(folder, torch.float64)
    ours = check_models.packed(policy, samples)
    assert check_models.difference(ours, theirs) <= check_models.LIMIT
    free, _ = check_models.one_by_one(folder, samples)
    assert (
        max(float((a - b).abs().max()) for a, b in zip(ours.logprobs, free.logprobs, strict=True))
        > 1e-2
    )
    assert float(ours.gradient["layers.0.mlp.gate.weight"].norm()) > 0


@pytest.mark.long(but=["qwen3_moe"])
@pytest.mark.parametrize(
    "name",
    [
        *SHOWN,
        *(pytest.param(name, marks=pytest.mark.long) for name in MIXTURES if name not in SHOWN),
    ],
)
def test_the_routers_own_choice_replayed_changes_nothing_and_a_planted_one_is_counted(
    name, folder_of, one_thread
):
    """Long for routers that choose by the same calls as one that stays.

    Long for the other routers: each only has its own way to choose.
    """
    policy = check_models.loaded(folder_of(name))
    routing = policy.decoder.routing
    samples = check_models.samples(policy.decoder.config.vocab_size)
    rows = check_models.packed_rows(samples)
    own = policy(*rows).logprobs
    before = routing.take(identity)
    assert [one.layer for one in before] == routing.layers
    layers, shape = len(policy.decoder.layers), rows[0].shape
    chosen = own_choice(policy, rows, layers)
    with torch.no_grad():
        routing.forget()
        again = policy(*rows, experts_BTLK=chosen).logprobs
        after = routing.take(identity)
        assert torch.equal(own, again)
        assert all(one.replayed == 1 and one.differing == 0 for one in after)
        assert [one.load for one in after] == [one.load for one in before]
        assert all(
            sum(one.load) == pytest.approx(1) and 0 < one.entropy <= np.log(EXPERTS) + 1e-9
            for one in after
        )
        # One token of each row is told another expert in the last layer that has any.
        row, place, layer = 0, 3, routing.layers[-1]
        others = sorted(set(range(EXPERTS)) - set(chosen[row, place, layer].tolist()))
        chosen[row, place, layer, 0] = others[0]
        unknown = shape[1] - 1
        while rows[2][0, unknown] < 0:
            unknown -= 1
        chosen[0, unknown] = -1
        policy(*rows, experts_BTLK=chosen)
        planted = routing.take(identity)
        tokens = int((rows[2] >= 0).sum())
        assert planted[-1].replayed == pytest.approx(1 - 1 / tokens)
        assert planted[-1].differing == pytest.approx(1 / (tokens - 1))
        assert all(one.differing == 0 for one in planted[:-1])
        assert routing_metrics(planted).differing == pytest.approx(
            planted[-1].differing / len(planted)
        )


def own_choice(policy, rows, layers):
    """Return what routers choose, as the experts are told it."""
    found = torch.full((*rows[0].shape, layers, 2), -1, dtype=torch.int16)
    calls = []
    hooks = []
    for layer in policy.decoder.layers:
        for block in layer.modules():
            if hasattr(getattr(block, "experts", None), "num_experts"):
                hooks.append(
                    block.experts.register_forward_pre_hook(lambda m, given: calls.append(given[1]))
                )
    with torch.no_grad():
        policy(*rows)
    for hook in hooks:
        hook.remove()
    for number, indices in zip(policy.decoder.routing.layers, calls, strict=True):
        found[:, :, number] = indices.reshape(*rows[0].shape, 2).short()
    return found


def test_layers_that_are_computed_again_replay_the_same_experts(folder_of, one_thread):
    gradients = []
    for settings in ({}, {"activation_checkpointing": True}):
        policy = check_models.loaded(folder_of("qwen3_moe"), **settings)
        samples = told(check_models.samples(policy.decoder.config.vocab_size), layers=2)
        found = check_models.packed(policy, samples).gradient
        gradients.append(
            {
                name.replace("_checkpoint_wrapped_module.", ""): gradient
                for name, gradient in found.items()
            }
        )
    plain, again = gradients
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


def test_a_router_that_chooses_in_another_way_is_refused_by_name(folder_of):
    policy = check_models.loaded(folder_of("phimoe"))
    rows = check_models.packed_rows(check_models.samples(policy.decoder.config.vocab_size))
    policy(*rows)
    experts = torch.zeros(*rows[0].shape, 2, 2, dtype=torch.int16)
    with pytest.raises(UserError, match=r"PhimoeTopKRouter does not choose experts by torch.topk"):
        policy(*rows, experts_BTLK=experts)


def test_a_pack_is_replayed_only_if_asked_and_only_on_its_own_model(folder_of):
    policy = check_models.loaded(folder_of("qwen3_moe"))
    samples = told(check_models.samples(policy.decoder.config.vocab_size), layers=2)
    pack = check_models._pack(samples, 128)

    def config(**settings):
        return check_models.training_config(folder_of("qwen3_moe"), **settings)

    assert replayed(pack, policy, config()).experts is None
    assert replayed(pack, policy, config(router_replay=True)).experts is pack.experts
    without = dataclasses.replace(pack, experts=None)
    deeper = dataclasses.replace(pack, experts=torch.cat([pack.experts, pack.experts], dim=2))
    more = dataclasses.replace(pack, experts=pack.experts + EXPERTS)
    for wrong, message in (
        (without, "the pack holds no experts"),
        (deeper, "up to number 3 of 4 layers, but the model has 4 experts and 2 layers"),
        (more, "up to number 7 of 2 layers, but the model has 4 experts"),
    ):
        with pytest.raises(PackError, match=message):
            replayed(wrong, policy, config(router_replay=True))
    with pytest.raises(
        UserError, match="the pack holds 1 experts of each token, but layer 0 chooses 2"
    ):
        policy(*check_models.policy_rows(pack), experts_BTLK=pack.experts[..., :1])

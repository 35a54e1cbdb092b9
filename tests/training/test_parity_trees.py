"""Rows that share beginnings as a tree, several turns included, against the same samples one by one
through transformers.
"""

import random

import pytest
import torch
from support import tiny_models
from support.tiny_models import VOCAB, load_policy_in

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.models.weights import to_hugging_face_names


def tree_of_samples(seed: int):
    """Prompts that continue one another, five deep, and three samples each: two equal, one that
    branches off in its third token; every other sample has a stretch of context between two turns.
    """
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB) for _ in range(3)]]
    for depth in range(4):
        prompts += [
            prompts[-1] + [draw.randrange(VOCAB) for _ in range(depth + 1)] for _ in range(2)
        ]
    prompts.append([draw.randrange(VOCAB)])
    samples = []
    for prompt in prompts:
        completion = [draw.randrange(VOCAB) for _ in range(draw.randint(4, 7))]
        branch = [*completion[:2], *(draw.randrange(VOCAB) for _ in range(4))]
        for number, tokens in enumerate([completion, completion, branch]):
            one = tiny_models.sample(prompt, tokens, advantage=draw.gauss(0, 1), number=number)
            if len(samples) % 2:
                one.assistant_mask[len(prompt) + 1] = one.assistant_mask[len(prompt) + 2] = False
            samples.append(one)
    return samples


@pytest.mark.long(but=["256-none"])
@pytest.mark.parametrize(("seq_len", "share"), [(256, "tree"), (40, "tree"), (256, "none")])
def test_logprobs_and_gradients_of_trees_equal_transformers(
    seq_len, share, model_folder, float64_reference
):
    """Long for cut rows: only these split a tree."""
    samples = tree_of_samples(0)
    packed = packed_tensors_from_tokenized_results(
        samples, seq_len=seq_len, pad_id=0, share=share, shortest_shared=1
    )
    assert max(len(one.groups) for one in packed.samples) >= (4 if share == "tree" else 1)
    policy = load_policy_in(model_folder())
    logprobs = policy(
        packed.tokens, packed.labels, packed.group_ids, packed.parent_ids, packed.input_pos
    ).logprobs
    trained = packed.labels != IGNORE
    (logprobs * packed.advantages[trained].double()).sum().backward()
    grid = torch.full(packed.labels.shape, torch.nan, dtype=torch.float64)
    grid[trained] = logprobs.detach()

    reference = float64_reference(model_folder())
    total = torch.zeros((), dtype=torch.float64)
    for number, one in enumerate(samples):
        logits = reference(torch.tensor([one.token_ids])).logits[0, :-1]
        every = torch.log_softmax(logits, -1).gather(1, torch.tensor(one.token_ids[1:])[:, None])[
            :, 0
        ]
        expected = every[torch.tensor(one.assistant_mask[1:])]
        ours = grid[(packed.sample_ids == number) & trained]
        torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-10)
        total = total + (expected * torch.tensor(one.advantage, dtype=torch.float32).double()).sum()
    total.backward()
    ours = to_hugging_face_names(
        {name: p.grad for name, p in policy.parameters_by_name().items()}, policy.decoder.config
    )
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(
            ours[name],
            parameter.grad,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda m, name=name: f"{name}: {m}",
        )

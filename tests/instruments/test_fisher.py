"""Predictions, splits and U-statistics where all sequences can be enumerated; projections against
whole gradients.
"""

import itertools

import pytest
import torch
from support.every_sequence import SEQUENCES, a_policy, exact_entropy, probabilities, tables

from ttrl.instruments.entropy import importance_entropy, others_mean
from ttrl.instruments.fisher import (
    Projection,
    Split,
    cosines,
    dot,
    fit_of,
    projection_error,
    projection_of,
    row_of,
    score_form,
    score_split,
)

COUNT = len(SEQUENCES)
REWARDS = torch.tensor([float(len(one)) - one.count(0) for one in SEQUENCES]).double()


def gradients(values, logits):
    """[S, parameters]: of each of several scalars."""
    rows = [torch.autograd.grad(one, logits, retain_graph=True)[0].flatten() for one in values]
    return torch.stack(rows)


@pytest.fixture(scope="module")
def world():
    """A policy, its probabilities, ∇log π and h = ∇J of every sequence, and a preconditioner."""
    logits = a_policy()
    logprobs, entropies = tables(logits)
    values, _ = importance_entropy(logprobs, entropies, logprobs.detach())
    scale = torch.rand(logits.numel(), generator=torch.Generator().manual_seed(9)).double() + 0.1
    return {
        "logits": logits,
        "probability": probabilities(logits),
        "logprobs": logprobs.detach().sum(dim=1),
        "scores": gradients(logprobs.sum(dim=1), logits),
        "entropy": gradients(values, logits),
        "scale": scale,
    }


def test_the_error_of_predicted_log_probabilities_falls_with_the_square_of_the_step(world):
    forces = world["scores"] * (REWARDS - 1.5)[:, None]
    kernel_a = (world["scores"] * world["scale"]) @ forces.T  # K·A by pairs
    direction = (world["scale"] * forces.sum(dim=0)).reshape(world["logits"].shape)
    errors = []
    for eta in (1e-3, 5e-4, 2.5e-4):
        with torch.no_grad():
            after = tables(world["logits"] + eta * direction)[0].sum(dim=1)
        errors.append(float((after - world["logprobs"] - eta * kernel_a.sum(dim=1)).norm()))
    for larger, smaller in itertools.pairwise(errors):
        assert larger / smaller == pytest.approx(4, rel=0.05)


def prompts_of_two(world):
    """Every pair of answers to a prompt: probability, entropy gradients and forces of both [P, 2,
    parameters]. Advantages are rewards minus the pair's mean, so the two depend on each other.
    """
    pairs = torch.tensor(list(itertools.product(range(COUNT), repeat=2)))
    probability = world["probability"][pairs].prod(dim=1)
    advantages = REWARDS[pairs] - REWARDS[pairs].mean(dim=1, keepdim=True)
    forces = advantages[:, :, None] * world["scores"][pairs]
    return probability, world["entropy"][pairs], forces


def test_the_u_statistic_has_no_bias_and_the_naive_one_that_of_its_formula(world):
    """Over all batches of two prompts with two answers each."""
    probability, entropy, forces = prompts_of_two(world)
    scale = world["scale"]
    # A batch is a mean over its 4 answers, for the entropy and for the update.
    whole, push = entropy.sum(dim=1) / 4, scale * forces.sum(dim=1) / 4
    between = whole @ push.T
    same = between.diagonal()
    own = (entropy / 4 * scale * forces / 4).sum(dim=(1, 2))
    split = Split(
        own=own[:, None] + own[None, :],
        same_prompt=(same - own)[:, None] + (same - own)[None, :],
        other_prompts=between + between.T,
        prompts=2,
    )
    batches = probability[:, None] * probability[None, :]
    assert float(batches.sum()) == pytest.approx(1)
    # Of one prompt: the mean of two answers.
    mean_a, mean_f = (probability @ one.mean(dim=1) for one in (entropy, forces))
    exact = float(mean_a @ (scale * mean_f))
    assert float((batches * split.unbiased).sum()) == pytest.approx(exact, rel=1e-12)
    a, f = entropy.mean(dim=1), forces.mean(dim=1)
    together = float(probability @ (a * scale * f).sum(dim=1))
    bias = (together - exact) / 2  # (3)
    assert abs(bias) > 0.01 * abs(exact)
    assert float((batches * split.naive).sum()) == pytest.approx(exact + bias, rel=1e-12)
    assert float((batches * split.bias).sum()) == pytest.approx(bias, rel=1e-10)


def test_the_first_order_is_that_of_the_exact_entropy(world):
    """E h = ∇H: the split's expectation is the change of the entropy, not of an estimate."""
    (slope,) = torch.autograd.grad(exact_entropy(world["logits"]), world["logits"])
    found = world["probability"] @ world["entropy"]
    torch.testing.assert_close(found, slope.flatten(), rtol=0, atol=1e-13)


def test_a_baseline_of_the_other_prompts_leaves_the_u_statistic_without_bias(world):
    """Over all batches of two prompts with one answer each: h depends on both."""
    logits = world["logits"]
    logprobs, entropies = tables(logits)
    forces = world["scores"] * (REWARDS - 1.5)[:, None] * world["scale"]
    mean = 0.0
    for pair in itertools.product(range(COUNT), repeat=2):
        chosen = list(pair)
        values, _ = importance_entropy(
            logprobs[chosen],
            entropies[chosen],
            logprobs[chosen].detach(),
            others_mean(entropies[chosen]),
        )
        h = gradients(values / 2, logits)
        f = forces[chosen] / 2
        own = float((h * f).sum())
        split = Split(own, 0.0, float((h @ f.T).sum()) - own, 2)
        mean += float(world["probability"][chosen].prod()) * split.unbiased
    exact = (world["probability"] @ world["entropy"]) @ (world["probability"] @ forces)
    assert mean == pytest.approx(float(exact), rel=1e-10)


def test_the_form_with_scores_has_no_bias(world):
    """Formula (2), over all pairs of sequences of the entropy batch."""
    push = world["scale"] * ((world["probability"] * (REWARDS - 1.5)) @ world["scores"])
    moves = world["scores"] @ push
    mean = 0.0
    for pair in itertools.product(range(COUNT), repeat=2):
        chosen = list(pair)
        found = score_form(world["logprobs"][chosen], moves[chosen])
        mean += float(world["probability"][chosen].prod()) * found
    exact = (world["probability"] @ world["entropy"]) @ push
    assert mean == pytest.approx(float(exact), rel=1e-10)
    # From another policy's sequences, with weights.
    other = probabilities(a_policy(3))
    weights = world["probability"] / other
    mean = 0.0
    for pair in itertools.product(range(COUNT), repeat=2):
        chosen = list(pair)
        found = score_form(world["logprobs"][chosen], moves[chosen], weights[chosen])
        mean += float(other[chosen].prod()) * found
    assert mean == pytest.approx(float(exact), rel=1e-10)


def test_the_split_by_scores_has_no_bias_either(world):
    """Over all batches of two prompts with one answer each."""
    forces = world["scores"] * (REWARDS - 1.5)[:, None] * world["scale"]
    kernel_a = world["scores"] @ forces.T
    mean = 0.0
    for pair in itertools.product(range(COUNT), repeat=2):
        chosen = list(pair)
        pairs = kernel_a[chosen][:, chosen] / 2  # forces of a mean over the two
        split = score_split(world["logprobs"][chosen], pairs, ["a", "b"])
        whole = score_form(world["logprobs"][chosen], pairs.sum(dim=1))
        assert split.naive == pytest.approx(whole) and split.same_prompt == pytest.approx(0)
        mean += float(world["probability"][chosen].prod()) * split.unbiased
    exact = (world["probability"] @ world["entropy"]) @ (world["probability"] @ forces)
    assert mean == pytest.approx(float(exact), rel=1e-10)
    together = score_split(world["logprobs"][[1, 2]], kernel_a[1:3, 1:3], ["a", "a"])
    assert together.other_prompts == pytest.approx(0) and together.same_prompt


def test_one_prompt_has_no_u_statistic():
    split = Split(1.0, 2.0, 0.0, 1)
    assert split.naive == 3 and split.unbiased != split.unbiased


SHAPES = {"a": (7, 9), "b": (5,), "c": (40,)}


def random_vectors(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in SHAPES.items()
        }
        for _ in range(count)
    ]


def test_a_projection_adds_each_parameter_with_a_sign_to_one_sum():
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    projection = Projection(zero, 16, seed=3)
    columns = []
    for name, shape in SHAPES.items():
        for place in range(torch.Size(shape).numel()):
            unit = {key: torch.zeros_like(value) for key, value in zero.items()}
            unit[name].view(-1)[place] = 1.0
            columns.append(row_of(unit, projection))
    matrix = torch.stack(columns, dim=1)
    assert (matrix.abs().sum(dim=0) == 1).all() and (matrix.abs().max(dim=0).values == 1).all()
    # No two of a block meet: the first 16 of a tensor.
    assert len(set(matrix[:, :16].abs().argmax(dim=0).tolist())) == 16
    (vector,) = random_vectors(1)
    flat = torch.cat([value.flatten() for value in vector.values()])
    torch.testing.assert_close(row_of(vector, projection), matrix.double() @ flat)


def test_a_projection_keeps_the_kernel_within_its_bound():
    """Over many seeds: no bias, and a variance below the stated one."""
    one, other = random_vectors(2)
    exact = dot(one, other)
    size, seeds = 16, 3000
    found = []
    for seed in range(seeds):
        projection = Projection(one, size, seed)
        found.append(float(row_of(one, projection) @ row_of(other, projection)))
    errors = torch.tensor(found).double() - exact
    bound = (dot(one, one) * dot(other, other) + exact**2) / size
    variance = float(errors.var())
    assert variance < bound * 1.1
    assert variance > bound * 0.5  # the bound is no empty one
    assert abs(float(errors.mean())) < 4 * (bound / seeds) ** 0.5


def test_the_projections_error_is_a_share_of_its_bound():
    vectors = random_vectors(40)
    total = random_vectors(1, seed=5)[0]
    exact = torch.tensor([dot(one, total) for one in vectors]).double()
    shares = []
    for seed in range(30):
        projection = Projection(total, 16, seed)
        rows = torch.stack([row_of(one, projection) for one in vectors])
        shares.append(projection_error(rows, row_of(total, projection), exact))
    assert 0.4 < sum(shares) / 30 < 1.05


def test_gradients_that_fit_are_held_whole():
    (vector,) = random_vectors(1)
    assert projection_of(vector, rows=100) is None
    two = 2 * sum(value.nbytes for value in vector.values())
    projection = projection_of(vector, rows=2, most_whole=two - 1)
    assert projection is not None and len(row_of(vector, projection)) == 2**16
    assert projection_of(vector, rows=2, most_whole=two) is None
    scale = {name: torch.rand(value.shape).double() for name, value in vector.items()}
    whole = row_of(vector, None, scale)
    weighted = dot(vector, {name: value * scale[name] for name, value in vector.items()})
    assert float(whole @ whole) == pytest.approx(weighted)


def test_cosines_of_zeros_are_zero():
    found = cosines(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[4.0, 3.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.96], [0.0]]).double())


def test_a_fit_describes_predictions():
    exact = fit_of([1.0, -2.0, 3.0], [1.0, -2.0, 3.0])
    assert (exact.count, exact.sign, exact.slope, exact.r_squared) == (3, 1.0, 1.0, 1.0)
    half = fit_of([2.0, -4.0, 6.0], [1.0, -2.0, -3.0])
    assert half.sign == pytest.approx(2 / 3)
    assert half.slope == pytest.approx((2 + 8 - 18) / (4 + 16 + 36))
    left = 1 + 4 + 81
    spread = sum((value + 4 / 3) ** 2 for value in (1, -2, -3))
    assert half.r_squared == pytest.approx(1 - left / spread)

"""The noise scale where the truth is known: linear regression with a known covariance, nested draws
with known traces.
"""

import math

import numpy as np
import pytest

from ttrl.facts import NestedNoise, Step, read_facts
from ttrl.instruments import gradient_noise as instrument
from ttrl.instruments.gradient_noise import (
    Noise,
    nested_noise,
    noise_of_pieces,
    unsplit,
)
from ttrl.run_folder import recent_noise as averaging
from ttrl.run_folder.recent_noise import best_allocation

COVARIANCE = np.diag(np.linspace(0.5, 2.0, 12))
AWAY = np.linspace(-0.4, 0.6, 12)  # of the weights from the best ones
LABEL_NOISE = 0.8
TRUE_GRADIENT = COVARIANCE @ AWAY
# Of g = x(x·d + e): E = Cd, and tr Cov = tr(C) d'Cd + |Cd|² + σ² tr C, by the fourth moments of a
# Gaussian.
SIGNAL = float(TRUE_GRADIENT @ TRUE_GRADIENT)
S = float(
    np.trace(COVARIANCE) * (AWAY @ COVARIANCE @ AWAY)
    + SIGNAL
    + LABEL_NOISE**2 * np.trace(COVARIANCE)
)


def regression_gradients(draw, count):
    x = draw.standard_normal((count, 12)) @ np.sqrt(COVARIANCE)
    return x * (x @ AWAY + LABEL_NOISE * draw.standard_normal(count))[:, None]


def pieces_of(gradients, sizes):
    """|h_j|², f_j and |g|² of a step."""
    parts = np.split(gradients, np.cumsum(sizes)[:-1])
    pieces = [part.sum(axis=0) / len(gradients) for part in parts]
    return (
        [float(h @ h) for h in pieces],
        [size / len(gradients) for size in sizes],
        float(sum(pieces) @ sum(pieces)),
    )


@pytest.mark.long(but=["128"])
@pytest.mark.parametrize("batch", [16, 32, 64, 128, 256, 512, 1024])
def test_linear_regression_gives_the_known_noise_and_the_law_of_one_over_the_batch(batch):
    """Long for the other sizes: only these show the law over two orders of magnitude."""
    draw = np.random.default_rng(batch)
    sizes = [batch // 2, batch // 4, batch // 8, batch // 8]  # unequal pieces
    steps = [
        noise_of_pieces(*pieces_of(regression_gradients(draw, batch), sizes))
        for _ in range(100_000 // batch + 1500)
    ]
    assert np.mean([step.noise for step in steps]) * batch == pytest.approx(S, rel=0.1)
    error = np.std([step.signal for step in steps]) / len(steps) ** 0.5
    assert np.mean([step.signal for step in steps]) == pytest.approx(
        SIGNAL, abs=max(0.1 * SIGNAL, 4 * error)
    )


def test_equal_pieces_are_the_formula_of_two_batch_sizes():
    draw = np.random.default_rng(0)
    squares, shares, whole = pieces_of(regression_gradients(draw, 64), [8] * 8)
    small, large = 8, 64
    g_small = sum(square / share**2 for square, share in zip(squares, shares, strict=True)) / 8
    found = noise_of_pieces(squares, shares, whole)
    assert found.noise * large == pytest.approx((g_small - whole) / (1 / small - 1 / large))
    assert found.signal == pytest.approx((large * whole - small * g_small) / (large - small))


def test_a_single_piece_says_nothing():
    assert noise_of_pieces([1.0], [1.0], 1.0) is None


BETWEEN, WITHIN = 2.0, 6.0  # tr Cov(u), tr Cov(e)


def nested_draw(draw, counts, dims=20):
    u = draw.standard_normal((len(counts), dims)) * math.sqrt(BETWEEN / dims)
    prompt = np.repeat(np.arange(len(counts)), counts)
    return prompt, 0.1 + u[prompt] + draw.standard_normal((len(prompt), dims)) * math.sqrt(
        WITHIN / dims
    )


def moments_of(prompt, x, counts):
    means = np.stack([x[prompt == p].mean(axis=0) for p in range(len(counts))])
    mean = x.mean(axis=0)
    between = float((np.array(counts) * ((means - mean) ** 2).sum(axis=1)).sum())
    return float(((x - means[prompt]) ** 2).sum()), between, float(mean @ mean)


@pytest.mark.long(but=["unequal"])
@pytest.mark.parametrize("counts", [[4] * 6, [1, 2, 8, 4, 4, 3]], ids=["equal", "unequal"])
def test_noise_between_prompts_and_between_samples(counts):
    """Long for equal groups: only these have a closed form without weights."""
    draw = np.random.default_rng(1)
    found = [
        nested_noise(counts, *moments_of(*nested_draw(draw, counts), counts)) for _ in range(4000)
    ]
    share = sum(c * c for c in counts) / sum(counts) ** 2
    assert np.mean([one.prompts for one in found]) == pytest.approx(share * BETWEEN, rel=0.05)
    assert np.mean([one.samples for one in found]) == pytest.approx(WITHIN / sum(counts), rel=0.05)
    assert np.mean([one.signal for one in found]) == pytest.approx(20 * 0.1**2, abs=0.02)


def test_prompts_that_lie_in_several_pieces_are_accounted_for():
    """Each of 6 prompts has 2 samples in each of 2 pieces: the pieces share all that is between
    prompts.
    """
    draw = np.random.default_rng(2)
    counts, plain, found = [4] * 6, [], []
    for _ in range(4000):
        prompt, x = nested_draw(draw, counts)
        order = np.argsort(np.tile([0, 0, 1, 1], 6), kind="stable")
        squares, shares, whole = pieces_of(x[order], [12, 12])
        plain.append(noise_of_pieces(squares, shares, whole))
        found.append(nested_noise(counts, *moments_of(prompt, x, counts)))
    truth = BETWEEN / 6 + WITHIN / 24
    together = Noise(
        *(np.mean([getattr(one, name) for one in plain]) for name in ("noise", "signal"))
    )
    nested = NestedNoise(
        *(
            np.mean([getattr(one, name) for one in found])
            for name in ("signal", "prompts", "samples")
        )
    )
    assert together.noise == pytest.approx(WITHIN / 24, rel=0.05)  # too little
    right = unsplit(together, nested, [0.5, 0.5], split=6 * (4 + 4) / (6 * 16))
    assert right.noise == pytest.approx(truth, rel=0.05)
    assert right.noise + right.signal == pytest.approx(together.noise + together.signal)


def test_what_cannot_be_told_apart_is_not():
    assert nested_noise([4], 1.0, 0.0, 1.0) is None
    assert nested_noise([1, 1, 1], 0.0, 1.0, 1.0) is None


def seen(draw, prompts=8, samples=4):
    counts = [samples] * prompts
    prompt, x = nested_draw(draw, counts)
    within, between, mean = moments_of(prompt, x, counts)
    squares, shares, whole = pieces_of(x, [samples * prompts // 4] * 4)
    layers = {
        "layers": ["head", "embeddings"],
        "squares": [[s / 4, 3 * s / 4] for s in squares],
        "whole": [whole / 4, 3 * whole / 4],
    }
    sketch = {"counts": counts, "within": within, "between": between, "mean": mean, "split": 1.0}
    return {**layers, **sketch, "shares": shares, "seconds": 0.1}


def line(noise):
    """Of train.jsonl."""
    return {"gradient_noise": noise, "row_tokens": 8 * 300 + 32 * 40, "trained_tokens": 32 * 40}


def step_noise(seen):
    return instrument.step_noise(seen).to_json()


def recent_noise(lines):
    return averaging.recent_noise([read_facts(Step, line) for line in lines]).to_json()


def test_a_line_of_training_and_the_average_of_the_last_ones():
    draw = np.random.default_rng(3)
    steps = [step_noise(seen(draw)) for _ in range(40)]
    assert steps[0]["prompts"] == 8 and steps[0]["samples"] == 32 and steps[0]["pieces"] == 4
    assert sum(noise for noise, _ in steps[0]["layers"].values()) == pytest.approx(
        steps[0]["noise"]
    )
    recent = recent_noise([line(step) for step in steps] + [line(steps[0]) | {"skipped": "why"}])
    assert recent["steps"] == 16
    last = steps[-16:]
    noise, signal = (sum(step[name] for step in last) / 16 for name in ("noise", "signal"))
    assert recent["scale"] == pytest.approx(8 * noise / signal)  # of means, not the mean of ratios
    assert recent["share"] == pytest.approx(noise / signal)
    assert recent["low"] < recent["scale"] < recent["high"]
    assert recent["from_samples"] == pytest.approx(
        (WITHIN / 32) / (BETWEEN / 8 + WITHIN / 32), abs=0.15
    )
    best = best_allocation(8, 4, recent["from_samples"], 300.0, 40.0)
    assert (recent["best_samples"], recent["best_prompts"], recent["gain"]) == (
        best.samples,
        best.prompts,
        best.gain,
    )


def test_steps_that_say_nothing_and_gradients_that_are_not_finite():
    assert recent_noise([]) == {} and recent_noise([{"loss": 1.0}, line({"pieces": 3})]) == {}
    broken = seen(np.random.default_rng(4)) | {"whole": [math.nan, 1.0]}
    assert step_noise(broken) == {"pieces": 4}
    one_piece = seen(np.random.default_rng(4))
    one_piece |= {"squares": [one_piece["whole"]], "shares": [1.0]}
    rows = [step_noise(one_piece), step_noise({**one_piece, "within": one_piece["within"] * 1.1})]
    recent = recent_noise([line(row) for row in rows])
    assert recent["from_sketch"] and "layers" not in recent
    noise = sum(row["nested"]["prompts"] + row["nested"]["samples"] for row in rows) / 2
    signal = sum(row["nested"]["signal"] for row in rows) / 2
    assert (recent["noise"], recent["signal"]) == pytest.approx((noise, signal))
    # Of the sketch, since nothing else was seen.
    assert recent["scale"] == pytest.approx(noise / signal * rows[0]["prompts"])
    assert "from_sketch" not in recent_noise(
        [line(rows[0]), line(step_noise(seen(np.random.default_rng(5))))]
    )


@pytest.mark.parametrize(
    ("from_samples", "prompt_cost"),
    [(0.9, 300.0), (0.2, 300.0), (0.6, 0.0), (1.0, 10.0), (0.5, 50.0)],
)
def test_the_best_allocation_is_the_best_of_all(from_samples, prompt_cost):
    found = best_allocation(16, 8, from_samples, prompt_cost, 40.0)
    between, within = (1 - from_samples) * 16, from_samples * 16 * 8  # P and E, of noise 1

    def product(samples):
        return (between + within / samples) * (prompt_cost + samples * 40.0)

    everything = range(2, 8 * 16)
    best = min(
        (s for s in everything if 2 * (prompt_cost + s * 40.0) <= 16 * (prompt_cost + 320.0)),
        key=product,
    )
    assert product(found.samples) == pytest.approx(product(best), rel=1e-3)
    assert found.gain == pytest.approx(product(8) / product(found.samples))

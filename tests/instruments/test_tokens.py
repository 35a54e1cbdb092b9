"""Outliers of the covariance against a loop over all tokens, and the parts of a mismatch that was
put together.
"""

import math

import pytest
import torch
from support.tiny_models import random_samples

from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.instruments.tokens import (
    CONTEXT,
    covariance_outliers,
    mismatch,
    outliers_text,
    tokens_of_high_covariance,
)


def test_the_outliers_are_the_tokens_with_the_largest_terms():
    samples = random_samples(3, (3, 5, 8), longest=30)
    rows = packed_tensors_from_tokenized_results(samples, seq_len=60, pad_id=0)
    trained = rows.labels != -100
    logprobs = torch.randn(int(trained.sum()), generator=torch.Generator().manual_seed(0))
    found = covariance_outliers(rows, logprobs, lambda ids: " ".join(map(str, ids)), count=5)

    advantages = rows.advantages[trained].double()
    terms = (logprobs.double() - logprobs.double().mean()) * (advantages - advantages.mean())
    assert found["mean"] == pytest.approx(float(terms.mean()))
    assert [abs(one["covariance"]) for one in found["tokens"]] == pytest.approx(
        terms.abs().sort(descending=True).values[:5].tolist()
    )
    assert found["share"] == pytest.approx(
        float(terms.abs().sort().values[-5:].sum() / terms.abs().sum())
    )
    by_name = {(one.task_id, one.sample): one for one in samples}
    for one in found["tokens"]:
        sample = by_name[one["task_id"], one["sample"]]
        place = sample.prompt_length + one["position"]
        assert one["text"] == str(sample.token_ids[place])
        before = sample.token_ids[max(sample.prompt_length, place - CONTEXT) : place]
        assert one["before"] == " ".join(map(str, before))
        assert one["advantage"] == pytest.approx(sample.advantage)
    assert len(outliers_text(found)) == 6


@pytest.mark.parametrize("objective", ["reinforce", "ppo", "clip_cov", "gspo"])
def test_the_tokens_of_high_covariance_are_clip_covs_whatever_the_objective(objective):
    samples = random_samples(3, (3, 5, 8), longest=30)
    rows = packed_tensors_from_tokenized_results(samples, seq_len=60, pad_id=0)
    trained = rows.labels != -100
    advantages = rows.advantages[trained].double()
    noise = torch.randn(int(trained.sum()), generator=torch.Generator().manual_seed(1))
    logprobs = rows.logprobs[trained].nan_to_num() + 0.5 * noise
    config = ObjectiveConfig(objective=objective, covariance_bounds=(0.1, 1.0))
    config.covariance_share = 0.05
    found = tokens_of_high_covariance(rows, logprobs, config, seed=3)

    terms = (logprobs.double() - logprobs.double().mean()) * (advantages - advantages.mean())
    count = len(terms)
    ratios = (logprobs - rows.logprobs[trained].nan_to_num(nan=math.nan)).exp()
    candidates = (terms > 0.1) & (terms < 1.0)
    candidates &= ~((ratios > 1.2) & (advantages > 0)) & ~((ratios < 0.8) & (advantages < 0))
    assert torch.equal(found["Clip-Cov's candidates"], candidates) and candidates.any()
    draw = found["Clip-Cov's draw"]
    assert int(draw.sum()) == int(0.05 * count) and not (draw & ~candidates).any()
    highest = found["highest 20%"]
    assert int(highest.sum()) == int(0.2 * count)
    assert terms[highest].min() >= terms[~highest].max()


def test_the_parts_of_a_mismatch_are_found_again():
    generator = torch.Generator().manual_seed(1)

    def noise(size):
        return size * torch.randn(5000, generator=generator, dtype=torch.float64)

    exact, lag, rounding, rest = -noise(1.0).abs(), noise(0.3), noise(0.1), noise(0.2)
    trainer = exact + rounding
    own = trainer - lag
    sampler = own - rounding - rest
    sampler[7] = torch.nan
    found = mismatch(sampler, trainer, own_N=own, exact_N=exact)
    assert {name: round(part["rms"], 2) for name, part in found.items()} == pytest.approx(
        {"whole": 0.14**0.5, "lag": 0.3, "rounding": 0.1, "rest": 0.2}, abs=0.02
    )
    shares = [found[name]["share"] for name in ("lag", "rounding", "rest")]
    assert sum(shares) == pytest.approx(1) and shares == pytest.approx(
        [9 / 14, 1 / 14, 4 / 14], abs=0.03
    )
    assert found["whole"]["share"] == pytest.approx(1)
    alone = mismatch(sampler, trainer)
    assert alone["rest"] == alone["whole"] and "lag" not in alone


def test_without_a_samplers_logprobs_there_is_no_mismatch():
    nothing = torch.full((3,), torch.nan)
    assert mismatch(nothing, torch.zeros(3)) == {}
    assert mismatch(torch.zeros(3), torch.zeros(3))["rest"] == {"mean": 0.0, "rms": 0.0}

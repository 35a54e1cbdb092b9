"""Sampler against trainer, token by token: figures against numpy, the worst tokens in their places,
lag apart from drift.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ttrl.configs import GRPOConfig
from ttrl.training.drift import LOGPROBS_FILE, TOLERANCES, WORST, compare_tokens
from ttrl.training.parallel.distributed import Ranks

HERE = Ranks(0, 1, torch.device("cpu"))


def fake_step(labels, versions, numbers, input_pos=None):
    rows = SimpleNamespace(
        labels=labels,
        weights_version=versions,
        input_pos=torch.arange(labels.shape[1]).expand_as(labels)
        if input_pos is None
        else input_pos,
        seq_len=labels.shape[1],
    )
    return SimpleNamespace(rows=rows, numbers=numbers)


def config(folder, **changes):
    return GRPOConfig(model="", packed="", output_dir=str(folder), **changes)


@pytest.fixture
def case(tmp_path):
    """Two steps whose rows lie in the pack in another order: 4 rows of 400 positions, about half of
    them trained.
    """
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 9, (4, 400), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.5] = -100
    versions = torch.randint(5, 7, labels.shape, generator=generator, dtype=torch.int32)
    trainer = -torch.rand(labels.shape, generator=generator)
    sampler = trainer + 1e-4 * torch.randn(labels.shape, generator=generator)
    order = [2, 0, 3, 1]
    steps = [
        fake_step(labels[order[:2]], versions[order[:2]], order[:2]),
        fake_step(labels[order[2:]], versions[order[2:]], order[2:]),
    ]
    return SimpleNamespace(
        labels=labels,
        versions=versions,
        trainer=trainer,
        sampler=sampler,
        order=order,
        steps=steps,
        folder=tmp_path,
    )


def compare(case, **changes):
    trained = case.labels[case.order] != -100
    logprobs, sampled = case.trainer[case.order][trained], case.sampler[case.order][trained]
    return compare_tokens(
        case.steps,
        logprobs,
        sampled,
        tuple(case.labels.shape),
        config(case.folder, **changes),
        HERE,
    ).to_json()


def test_figures_equal_numpy_for_all_tokens_and_for_each_version(case):
    result = compare(case, drift_tolerance=1e-4)
    for version, figures in [
        (None, result),
        *[(int(v), f) for v, f in result["by_version"].items()],
    ]:
        chosen = (case.labels != -100).numpy()
        if version is not None:
            chosen &= case.versions.numpy() == version
        difference = (case.trainer.double() - case.sampler.double()).numpy()[chosen]
        weights = np.exp(difference)
        assert figures["tokens"] == chosen.sum() and figures["not_finite"] == 0
        assert figures["mean"] == pytest.approx(np.abs(difference).mean())
        assert figures["p999"] == pytest.approx(
            np.quantile(np.abs(difference), 0.999, method="inverted_cdf")
        )
        assert figures["outside"] == pytest.approx((np.abs(difference) > 1e-4).mean())
        assert figures["ess"] == pytest.approx(
            weights.sum() ** 2 / (weights**2).sum() / len(weights)
        )
    assert set(result["by_version"]) == {"5", "6"} and result["tolerance"] == 1e-4


def test_one_token_does_not_decide_about_the_effective_sample_size_of_most(tmp_path):
    sampler = torch.zeros(1, 2000)
    trainer = torch.where(
        torch.arange(2000) == 7,
        4.0,
        1e-3 * torch.randn(2000, generator=torch.Generator().manual_seed(0)),
    )
    step = fake_step(
        torch.ones(1, 2000, dtype=torch.int64), torch.zeros(1, 2000, dtype=torch.int32), [0]
    )
    result = compare_tokens(
        [step], trainer, sampler[0], (1, 2000), config(tmp_path), HERE
    ).to_json()
    assert (
        result["ess"] < 0.5
        and result["by_version"]["0"]["ess_of_most"] == result["ess_of_most"] > 0.9999
    )


def test_the_worst_tokens_are_found_in_their_places(case):
    places = (case.labels != -100).nonzero().tolist()
    planted = [places[k * 37] for k in range(5)]
    for k, (row, position) in enumerate(planted):
        case.sampler[row, position] = case.trainer[row, position] - 1 - k
    worst = compare(case)["worst"]
    assert len(worst) == 2 * WORST  # of both versions
    found = [
        (one["row"], one["position"]) for one in worst if abs(one["trainer"] - one["sampler"]) > 0.5
    ]
    assert sorted(found) == sorted(map(tuple, planted))
    for one in worst:
        assert one["version"] == case.versions[one["row"], one["position"]]
        assert one["trainer"] == pytest.approx(float(case.trainer[one["row"], one["position"]]))
    of_one = [abs(one["trainer"] - one["sampler"]) for one in worst if one["version"] == 5]
    assert of_one == sorted(of_one, reverse=True)


def test_the_trainers_numbers_are_kept_in_the_places_of_the_pack(case):
    compare(case)
    kept = load_file(case.folder / LOGPROBS_FILE)["logprobs"]
    trained = case.labels != -100
    assert torch.equal(kept[trained], case.trainer[trained]) and kept[~trained].isnan().all()


def test_numbers_that_are_not_finite_are_counted_named_and_left_out(case):
    (row, position), (other_row, other) = (case.labels != -100).nonzero()[[3, 50]].tolist()
    case.trainer[row, position], case.sampler[other_row, other] = math.nan, -math.inf
    result = compare(case)
    assert result["not_finite"] == 2 and result["mean"] < 1e-3
    unknown = [one for one in result["worst"] if one["trainer"] is None or one["sampler"] is None]
    assert {(one["row"], one["position"]) for one in unknown} == {
        (row, position),
        (other_row, other),
    }


def test_tokens_without_a_sampler_logprob_are_unknown_and_not_compared(case):
    case.sampler[0] = math.nan
    result = compare(case)
    assert result["unknown"] == int((case.labels[0] != -100).sum()) and result["not_finite"] == 0
    assert all(one["row"] != 0 for one in result["worst"])
    case.sampler[:] = math.nan
    result = compare(case)
    assert result["tokens"] == 0 and "worst" not in result and "mean" not in result


def test_what_grows_with_the_position_shows(case):
    case.sampler = case.trainer + 1e-3 * torch.arange(400) / 400
    means = compare(case)["by_position"]
    assert means == sorted(means) and means[3] > 4 * means[0]


def test_the_tolerance_follows_the_dtype(case):
    assert compare(case)["tolerance"] == TOLERANCES["fp32"]
    assert compare(case, dtype="bf16")["tolerance"] == TOLERANCES["bf16"]

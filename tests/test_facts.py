"""Facts: what a file holds, and what is read of it whatever it holds."""

import json

import pytest

from ttrl.facts import (
    Difference,
    Flops,
    MetricsRow,
    PackFacts,
    PackFigures,
    SamplerTrainer,
    Sync,
    TrainFigures,
    ValidateFacts,
    number,
    parse,
    part_of,
    ratio,
    read_facts,
)


def test_what_is_not_there_is_not_written_and_read_as_empty():
    row = MetricsRow(iteration=1, train=TrainFigures(loss=1.0), sync=Sync(mode="reload"))
    written = row.to_json()
    assert written == {
        "iteration": 1,
        "train": {"loss": 1.0},
        "sync": {"mode": "reload", "canary_max_difference": None, "fell_back": None},
    }
    assert read_facts(MetricsRow, json.loads(json.dumps(written))) == row
    assert row.pack.advantages.lowest is None and row.compared.own.p999 is None


def test_a_null_with_a_meaning_of_its_own_is_written():
    row = MetricsRow(iteration=1, reward=None, sampler_trainer=None)
    assert row.to_json() == {"iteration": 1, "reward": None, "sampler_trainer": None}
    assert row.compared == SamplerTrainer() and number(row.reward) is None


@pytest.mark.parametrize("nonsense", [None, "?", [], {}, {"kl": "?"}, {"kl": None}])
def test_what_is_of_another_type_counts_as_missing(nonsense):
    row = read_facts(MetricsRow, {"iteration": 3, "train": nonsense, "reward": 0.5})
    assert row == MetricsRow(iteration=3, reward=0.5)
    assert read_facts(MetricsRow, {"iteration": 3, "reward": nonsense}).held_out("exact") is None


def test_names_of_later_versions_are_ignored_and_facts_in_mappings_are_read():
    compared = {"by_version": {"4": {"mean": 0.1, "later": 1, "tokens": None}}, "later": {}}
    assert read_facts(SamplerTrainer, compared).by_version == {"4": Difference(mean=0.1)}
    found = read_facts(ValidateFacts, {"intervals": {"reward": [0, 1]}, "sync": None})
    assert found.intervals == {"reward": (0.0, 1.0)}


def test_a_part_of_facts():
    facts = PackFacts(seconds=2.0, rows=3)
    assert part_of(PackFigures, facts) == PackFigures(rows=3)


def test_flat_names_leave_out_versions():
    compared = SamplerTrainer(mean=0.5, by_version={"0": Difference(mean=0.5)})
    row = MetricsRow(iteration=2, sampler_trainer=compared, validation={"5": 1.0})
    assert row.by_name("/") == {"iteration": 2, "sampler_trainer/mean": 0.5, "validation/5": 1.0}


def test_strict_reading_names_what_is_wrong():
    assert parse(Flops, b'{"total": 3, "later": 1}') == Flops(total=3.0)
    with pytest.raises(ValueError, match=r"\$\.total"):
        parse(Flops, b'{"total": "3"}')
    with pytest.raises(ValueError, match="truncated"):
        parse(Flops, b"{")


def test_ratios_and_numbers():
    assert ratio(1, 4) == 0.25 and ratio(1, 0) is None and ratio(None, 1) is None
    assert number(True) is None and number(float("nan")) is None and number(2) == 2.0

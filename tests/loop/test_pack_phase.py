"""What a run's settings do to its packs: samples that are too long, sharing, rows for several
ranks; and what is said of it.
"""

import pytest
import yaml

from ttrl.data.packing.pack import PackedTensors
from ttrl.errors import PackError


@pytest.fixture
def long_world(world):
    """Each group's last answer takes 60 tokens, more than a row."""
    world.answer = lambda prompt, k, version: ("yes", "no", "no", "no" * 30)[k]
    return world


def pack_of(world) -> PackedTensors:
    return PackedTensors.load(world.run / "iterations/0001/packed.safetensors")


@pytest.mark.parametrize(
    ("too_long", "dropped", "said", "notice"),
    [
        (
            "drop",
            {"too_long": 2},
            "2 too long",
            "Samples were longer than a row (seq_len): 2 (too long, left out).",
        ),
        (
            "truncate",
            {"too_long": 0, "truncated": 2},
            "2 cut off",
            "Samples were longer than a row (seq_len): 2 (cut off).",
        ),
        (
            "extend",
            {"too_long": 0, "extended": 2},
            "2 in longer rows",
            "Samples were longer than a row (seq_len): 2 (in longer rows).",
        ),
    ],
)
def test_samples_longer_than_a_row(long_world, capsys, too_long, dropped, said, notice):
    long_world.writes_reports = True
    long_world.train(iterations=1, seq_len=40, too_long=too_long, validation=[])
    (row,) = (row for row in long_world.rows() if row["iteration"] == 1)
    assert row["pack"]["dropped"] == {"no_trained_token": 0} | dropped
    assert said in capsys.readouterr().out
    assert notice in (long_world.run / "report.html").read_text()
    packed = pack_of(long_world)
    assert len(packed.samples) == (6 if too_long == "drop" else 8)
    assert (packed.seq_len == 40) == (too_long != "extend")


def test_too_long_can_end_the_run_and_be_put_right(long_world):
    with pytest.raises(PackError, match=r"2 of 8 samples are too long\. Raise seq_len to at least"):
        long_world.train(iterations=1, seq_len=40, too_long="error", validation=[])
    long_world.train(iterations=1, seq_len=40, too_long="drop", validation=[])
    assert len(pack_of(long_world).samples) == 6


def test_rows_are_even_for_the_ranks_and_sharing_can_be_turned_off(world):
    world.train(iterations=1, nproc_per_node=2, share="none", validation=[])
    packed = pack_of(world)
    assert packed.num_rows % 2 == 0
    assert all(len(sample.groups) == 1 for sample in packed.samples)


def test_a_run_that_is_older_than_a_setting_goes_on(world):
    world.train(iterations=1, validation=[])
    path = world.run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name in ("too_long", "share", "reward_power"):
        del config[name]
    path.write_text(yaml.safe_dump(config))
    world.train(iterations=2, validation=[])
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2]
    assert yaml.safe_load(path.read_text())["reward_power"] == 1.0


@pytest.mark.parametrize("training", [{}, {"value_head": True}])
def test_groups_of_equal_rewards_stay_where_tokens_get_rewards_of_their_own(world, training):
    world.answer = lambda prompt, k, version: "yes"
    world.train(iterations=1, training=training, validation=[])
    (row,) = (row for row in world.rows() if row["iteration"] == 1)
    assert row["groups"]["no_signal"] == row["groups"]["total"] > 0
    path = world.run / "iterations/0001/packed.safetensors"
    assert path.exists() == bool(training)
    if training:
        packed = pack_of(world)
        assert len(packed.samples) == row["groups"]["total"] * 4
        assert not packed.advantages.any()

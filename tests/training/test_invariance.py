"""The gradient of an update is the same however it is computed, and it is that of the loss:
`tools/check_invariance.py` against transformers in float64 on unpacked sequences. The whole table
is the tool's; here is a part of it.
"""

from pathlib import Path

import check_invariance as tool
import pytest
import torch

from ttrl.training.parallel.distributed import Ranks

HERE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Makes, once, the inputs of an objective."""
    made = {}

    def make(objective, group_size=4):
        if (objective, group_size) not in made:
            folder = tmp_path_factory.mktemp(objective)
            made[objective, group_size] = tool.make_inputs(folder, objective, group_size=group_size)
        return made[objective, group_size]

    return make


QUICK = [
    tool.Way("row by row", {"rows_per_microbatch": 1}),
    tool.Way(
        "another order, all rows at once, one chunk",
        {"rows_per_microbatch": 100, "num_output_chunks": 1},
        order=1,
    ),
    tool.Way(
        "checkpointing",
        {"activation_checkpointing": True, "rows_per_microbatch": 2, "row_length_multiple": 32},
    ),
]


@pytest.mark.long(
    but=[
        "another order, all rows at once, one chunk-gspo-entropy-kl",
        "another order, all rows at once, one chunk-ppo-k3",
        "checkpointing-gspo-entropy-kl",
    ]
)
@pytest.mark.parametrize("objective", ["ppo-k3", "gspo-entropy-kl"])
@pytest.mark.parametrize("way", QUICK, ids=lambda way: way.name)
def test_the_gradient_and_the_step_do_not_depend_on_how_they_are_computed(way, objective, inputs):
    """Long for the other ways: only these compute row by row, or PPO with checkpointing."""
    gradient, step = tool.errors_of(way, inputs(objective), HERE)
    assert gradient < tool.TOLERANCE
    assert step < tool.TOLERANCE


def test_the_check_notices_a_wrong_gradient(inputs):
    """A loss with other clipping bounds is another loss."""
    way = tool.Way("other bounds", {"clip_low": 0.05, "clip_high": 0.05})
    gradient, step = tool.errors_of(way, inputs("ppo-k3"), HERE)
    assert min(gradient, step) > 100 * tool.TOLERANCE


def test_rows_are_shared_and_several(inputs):
    """What makes the comparison worth something."""
    for order in (0, 1):
        packed = inputs("ppo-k3").packed(order)
        assert packed.num_rows > 2
        assert (packed.parent_ids != packed.group_ids).any()
        assert len(packed.samples) == 32
    assert not torch.equal(inputs("ppo-k3").packed(0).tokens, inputs("ppo-k3").packed(1).tokens)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(1200)  # tests of a high limit begin first
@pytest.mark.parametrize("objective", tool.OBJECTIVES)
def test_two_processes(objective, inputs, monkeypatch):
    """Long: only this computes every objective in two processes, in every way. That two processes
    count no token twice: tests/e2e/test_parallel.py; every objective in one: above.
    """
    # The processes import the tool by its name.
    monkeypatch.syspath_prepend(Path(tool.__file__).parent)
    chosen = [
        way
        for way in tool.ways()
        if way.processes == 2
        and way.exact
        and "compile" not in way.settings
        and not (way.order and "order 2" in way.name)
    ]
    assert len(chosen) >= 10
    for way, (gradient, step) in zip(
        chosen, tool.errors_in_processes(chosen, inputs(objective, 8), 2), strict=True
    ):
        assert gradient < tool.TOLERANCE, way.name
        assert step < tool.TOLERANCE, way.name

"""A probe with a real server and a real trainer: what a plan takes from it, whatever a random model
says.

Long: only this measures the memory of real processes in a probe. Probes on fake parts:
tests/loop/test_probe.py.
"""

import pytest

from ttrl import TrainConfig, plan
from ttrl.loop.run_plan import Assumptions
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_probe_measures_server_and_trainer(tmp_path):
    """With made-up prompts, and completions that are told how long to be."""
    model = make_tiny_model(tmp_path / "model", layers=1, width=32, heads=1)
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model=str(model),
        iterations=5,
        tasks_per_iteration=4,
        samples_per_task=4,
        max_tokens=16,
        seq_len=256,
    )
    made = plan(config, assumptions=Assumptions(prompt_tokens=10, completion_tokens=6), probe=True)
    assert not (tmp_path / "run").exists()
    # Ignore_eos: none ends before.
    assert made.work.samples == 16 and made.work.completion_tokens == 16 * 6
    assert made.flops.training > 0 and made.work.rows > 0
    assert {name: made.seconds.phases[name].source for name in ("sample", "train")} == {
        "sample": "probe",
        "train": "probe",
    }
    assert (
        made.seconds.start["server"].source == "probe" and made.seconds.start["server"].seconds > 0
    )
    # Estimates lie within the processes' real sizes; nothing here depends on what else the machine
    # does.
    assert made.measured_memory["server"] > 0.3e9 and made.measured_memory["trainer"] > 0.2e9
    assert "measured in a probe" in str(made)

"""One step off policy on real parts: who sampled what, and that policy lag is not taken for a
fault.

Long: only this syncs vLLM while its next samples wait. Who samples what on fake parts:
tests/loop/test_overlap.py; a real run that syncs ahead of its files: test_run.py.
"""

import itertools

import pytest

from ttrl import Task, TrainConfig, train
from ttrl.data.packing.pack import PackedTensors
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


def test_one_step_off_policy(tmp_path):
    numbers = itertools.count()

    # Whatever the model says, no two rewards are equal: every group has a signal.
    def grader(choice):
        return next(numbers) / 1000

    tasks = [
        Task([{"role": "user", "content": f"vowels {n}"}], grader, id=f"vowels/{n}")
        for n in range(10)
    ]
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model=str(make_tiny_model(tmp_path / "model", layers=2, width=64, heads=2)),
        iterations=3,
        tasks_per_iteration=4,
        samples_per_task=4,
        max_tokens=8,
        seq_len=256,
        num_threads=1,
        off_policy_steps=1,
        training={"lr": 1e-2},
        server={"max_num_seqs": 32},
    )
    result = train(config, tasks[:8], tasks[8:], quiet=True)
    assert [row["iteration"] for row in result.metrics] == [0, 1, 2, 3]
    folder = RunFolder(result.run)
    for number, version in ((1, 0), (2, 0), (3, 1)):
        path = folder.iteration(number).path
        assert {row["weights_version"] for row in read_jsonl(path / "rollouts.jsonl")} == {version}
        packed = PackedTensors.load(path / "packed.safetensors")
        assert packed.weights_version[packed.assistant_mask].unique().tolist() == [version]
        assert {row["weights_version"] for row in read_jsonl(path / "validation.jsonl")} == {number}
        drift = read_jsonl(path / "train.jsonl")[0]["sampler_trainer"]
        assert list(drift["by_version"]) == [str(version)]
        assert folder.policy_version(number) == number
    # The first iteration is trained from the policy that sampled it; there server and trainer must
    # agree.
    drift = read_jsonl(folder.iteration(1).path / "train.jsonl")[0]["sampler_trainer"]
    assert drift["by_version"]["0"]["mean"] < 1e-3
    assert "off_policy: token" in (folder.iteration(3).path / "grpo.yaml").read_text()
    assert all(row["sync"]["canary_max_difference"] < 1e-3 for row in result.metrics[1:])

"""Iterations that a run was stopped for, thrown away and done again: only where that is asked for.
On fake parts.
"""

import logging
from uuid import uuid4

import pytest
from support import os_calls

from ttrl import TrainConfig
from ttrl.errors import DriftError, RunFolderError, UserError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.redo import throw_away
from ttrl.system.files import digest, read_jsonl
from ttrl.system.mirror_store import MirrorStore

GOOD = {"tokens": 4000, "not_finite": 0, "mean": 1e-6, "p999": 1e-5, "ess": 1.0, "outside": 0.0}
BAD = GOOD | {"mean": 0.07}
DRIFTED = {"sampler_trainer": GOOD | {"by_version": {"1": BAD}}}
OFF_POLICY = {
    "sampler_trainer": BAD
    | {"by_version": {"1": BAD}, "own_weights": BAD | {"version": 1, "rows": 4}}
}


def train(world, redo=None, **changes):
    return world.train(world.tasks(8), redo=redo, **changes)


def content(world):
    """What a run came to, but for times."""
    found = {}
    for path in sorted((world.run / "iterations").rglob("*")):
        name = str(path.relative_to(world.run))
        if path.name in ("rollouts.jsonl", "validation.jsonl"):
            found[name] = [{**row, "logprob_tokens": None} for row in read_jsonl(path)]
        elif path.is_file() and (
            path.suffix in (".safetensors", ".txt") or path.name == "train.jsonl"
        ):
            found[name] = digest(path)
    return found | {
        row["iteration"]: (row.get("reward"), row["validation_reward"]) for row in world.rows()
    }


@pytest.fixture
def undisturbed(world, tmp_path):
    """By off_policy_steps, the same run without drift."""

    def of(steps):
        drifted, run = world.run, world.run
        world.run, world.step_facts = tmp_path / "undisturbed", {}
        train(world, off_policy_steps=steps)
        whole, world.run = content(world), run
        assert world.run == drifted
        return whole

    return of


@pytest.mark.long(but=["1-3-facts1"])
@pytest.mark.parametrize(("steps", "number", "facts"), [(0, 2, DRIFTED), (1, 3, OFF_POLICY)])
def test_drift_ends_the_run_until_its_iteration_is_done_again(
    world, undisturbed, monkeypatch, caplog, steps, number, facts
):
    """Long for the first iteration: only that has no policy before it."""
    world.step_facts = {number: facts}
    with pytest.raises(
        DriftError,
        match=rf"4,000 tokens of policy 1(?s:.*)TTRL_REDO={number} in front of it",
    ):
        train(world, off_policy_steps=steps)
    asked = len(world.requests)
    with pytest.raises(DriftError):  # never by itself
        train(world, off_policy_steps=steps)
    assert not [prompt for _, prompt in world.requests[asked:] if prompt.startswith("task")]
    world.step_facts, asked = {}, len(world.requests)
    monkeypatch.setenv("TTRL_REDO", str(number))
    train(world, off_policy_steps=steps)
    again = [version for version, prompt in world.requests[asked:] if prompt.startswith("task")]
    assert again.count(1) >= 2 and f"iterations {number}" in caplog.text
    # Left in the environment it does no harm.
    world.events.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(world, off_policy_steps=steps)
    assert world.events == ["stop"] and "removes nothing" in caplog.text
    assert content(world) == undisturbed(steps)


def test_killed_while_throwing_away(world, undisturbed):
    """With drift="warn" the run went on, so that there are later iterations, and lines of
    metrics.
    """
    world.step_facts = {2: DRIFTED}
    train(world, drift="warn")
    world.step_facts = {}
    for count in range(2):
        removed = []

        def killed(source, target, *_, removed=removed, count=count):
            if "-removed-" in str(target):
                if len(removed) == count:
                    raise KeyboardInterrupt
                removed.append(source)

        with os_calls.before("os.rename", killed), pytest.raises(KeyboardInterrupt):
            train(world, redo=2, drift="warn")
        assert [row["iteration"] for row in world.rows()] == [0, 1]
        assert (world.run / "iterations/0003").exists() == (count == 0) and (
            world.run / "iterations/0002"
        ).exists()
    train(world, redo=2)
    assert content(world) == undisturbed(0)


def test_the_mirror_is_thrown_away_too(world, undisturbed):
    address = f"memory://{uuid4().hex}"
    world.step_facts = {2: DRIFTED}
    with pytest.raises(DriftError):
        train(world, mirror=address)
    store = MirrorStore(address)
    assert "iterations/0002/done/train.json" in store.keys()  # noqa: SIM118
    world.step_facts = {}
    removed = []

    class Remembering(MirrorStore):
        def remove(self, keys):
            removed.append(list(keys))
            super().remove(removed[-1])

    run = RunFolder(world.run)
    with run.locked():
        throw_away(run, TrainConfig.parse(run.config(), "config"), 2, Remembering(address))
    train(world, mirror=address)
    # Cut off anywhere, what is left is the beginning of the run.
    assert removed[0] == [
        f"iterations/0002/done/{phase}.json" for phase in ("train", "pack", "rollouts")
    ]
    for key in store.keys():  # noqa: SIM118
        if key.startswith("iterations/"):
            assert store.read(key) == (world.run / key).read_bytes()
    assert content(world) == undisturbed(0)


def test_what_cannot_be_done_again_is_kept(world, monkeypatch):
    world.step_facts = {2: DRIFTED}
    with pytest.raises(DriftError):
        train(world)
    (world.run / "iterations/0001/state").rename(world.folder / "state")
    with pytest.raises(
        RunFolderError,
        match=r"iteration 2 cannot run again: .*0001/state, its starting point, no longer exists",
    ):
        train(world, redo=2)
    assert RunFolder(world.run).iteration(2).is_done("train")
    for wrong in (0, -1, "2", True, 2.0):
        with pytest.raises(UserError, match=f"redo is {wrong!r}"):
            train(world, redo=wrong)
    for wrong in ("all", "-1", "1.5", "0x2", "2 3"):
        monkeypatch.setenv("TTRL_REDO", wrong)
        with pytest.raises(UserError, match=f"TTRL_REDO is '{wrong}'"):
            train(world)

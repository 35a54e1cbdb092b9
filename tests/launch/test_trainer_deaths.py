"""A trainer that is killed is started again, a limited number of times; one that fails by itself
ends the run.
"""

import sys
import time
from pathlib import Path

import pytest

from ttrl.errors import TrainerDiedError, TrainerError
from ttrl.launch.tune import TrainerProcess
from ttrl.system.files import TEMPORARY_PREFIX


def dying(world, when: dict[int, list[str]]) -> list[str]:
    """A trainer that ends in iteration n as often as `when[n]` names: when "asked", or "at work";
    returns what happened.
    """
    happened: list[str] = []
    base = world.trainer()

    class Dying(base):
        def make_checkpoint(self, number, recipe_config):
            left = when.get(number, [])
            how = left.pop(0) if left else "well"
            happened.append(f"{number} {how}")
            if how == "asked":
                raise TrainerDiedError("the trainer failed (killed by signal 9)")
            if how == "fails":
                raise TrainerError("the trainer failed (exit code 1)")
            if how == "at work":
                (Path(recipe_config["output_dir"]) / f"{TEMPORARY_PREFIX}x-checkpoint").mkdir()
                raise TrainerDiedError("the trainer failed (killed by signal 9)")
            return super().make_checkpoint(number, recipe_config)

    world.trainer_class = Dying
    return happened


@pytest.mark.parametrize("how", ["at work", pytest.param("asked", marks=pytest.mark.long)])
def test_a_killed_trainer_is_started_again(world, how):
    """Long for a death when it is asked: only this finds a trainer dead that was well. One that
    dies while it waits: below.
    """
    happened = dying(world, {0: [how], 2: [how, how]})
    result = world.train(iterations=3)
    assert [row["iteration"] for row in result.metrics] == [0, 1, 2, 3]
    assert happened == [f"0 {how}", "0 well", "1 well", f"2 {how}", f"2 {how}", "2 well", "3 well"]
    # Nor is the disk full of what they left half written.
    assert not list(world.run.rglob(f"{TEMPORARY_PREFIX}*"))


@pytest.mark.parametrize(
    ("deaths", "error"), [(["asked"] * 3, TrainerDiedError), (["fails"], TrainerError)]
)
def test_but_not_for_ever(world, deaths, error):
    happened = dying(world, {2: list(deaths)})
    with pytest.raises(error):
        world.train(iterations=3)
    assert happened == ["0 well", "1 well", *(f"2 {how}" for how in deaths)]
    assert world.train(iterations=3).metrics[-1]["iteration"] == 3  # the same call goes on


def test_one_that_dies_while_it_waits_ends_nothing(world):
    deaths = []

    class Idle(world.trainer()):
        def start(self, recipe_config):
            world.hold = lambda prompt: len(deaths) == 0

        def make_checkpoint(self, number, recipe_config):
            world.hold = lambda prompt: len(deaths) == number
            return super().make_checkpoint(number, recipe_config)

        def check(self):
            if world.hold(""):
                deaths.append(1)
                raise TrainerDiedError("the trainer failed (killed by signal 9)")

    world.trainer_class = Idle
    assert world.train(iterations=2, trainer_restarts=1).metrics[-1]["iteration"] == 2
    assert len(deaths) == 3  # once in each iteration is not too often


@pytest.mark.parametrize(
    ("code", "command", "log", "kind"),
    [
        (-9, [], "", TrainerDiedError),
        (1, [], "RuntimeError: mat1 and mat2 shapes cannot be multiplied", TrainerError),
        # Torchrun, of one of its ranks.
        (1, [], "  traceback : Signal 9 (SIGKILL) received by PID 4242", TrainerDiedError),
        (1, ["--nnodes", "2"], "RuntimeError: Connection closed by peer", TrainerDiedError),
        # Another start mends nothing.
        (1, ["--nnodes", "2"], "ttrl.errors.ConfigError: lr is -1", TrainerError),
        (
            1,
            ["--nnodes", "2"],
            "ttrl.grpo_recipe: DivergedError: 5 optimizer steps in a row were skipped",
            TrainerError,
        ),
    ],
)
def test_what_counts_as_killed(tmp_path, code, command, log, kind):
    program = (
        f"import os, sys; print({log!r}, flush=True); sys.exit({code}) if {code} > 0 else "
        f"os.kill(os.getpid(), {-code})"
    )
    process = TrainerProcess(
        [sys.executable, "-S", "-c", program, *command], tmp_path / "log", tmp_path / "progress"
    )
    with pytest.raises(TrainerError) as caught, process:
        while not process.ended():
            time.sleep(0.01)
    assert type(caught.value) is kind

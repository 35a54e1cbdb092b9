"""Provide the public `train`: check everything, announce the run, then load slow modules."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.loop.checks import checked
from ttrl.run_folder.config_changes import allowed_names
from ttrl.run_folder.mirror import with_local_run
from ttrl.run_folder.redo import redo_asked
from ttrl.system.console import Console, mistakes_in_lines
from ttrl.tasks.task import Task

if TYPE_CHECKING:
    from ttrl.loop.train import RunResult


@mistakes_in_lines()
def train(
    config: TrainConfig,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task] = (),
    *,
    quiet: bool = False,
    allow_changes: Sequence[str] = (),
    take_over: bool = False,
    redo: int | None = None,
) -> "RunResult":
    """Train `config.model` on `tasks` by reinforcement learning; the same call on the same run
    folder continues it.

    validation_tasks: held out, never trained on; each policy is asked them.
    quiet: say nothing on standard output.
    allow_changes: names of settings, such as "training.lr", allowed to differ from the values the
        run began with; or "all".
    take_over: continue the run although its owner is on another machine and gives no sign of life.
    redo: discard this iteration, ended by DriftError, and all after it, and do them again. (From a
        shell: TTRL_ALLOW_CHANGES=training.lr, TTRL_TAKE_OVER=1, TTRL_REDO=5.)

    Raises ConfigError and TaskError for wrong arguments, before anything expensive starts;
    ModelFolderError, RunFolderError, ServerError, TrainerError, DriftError and StorageError later.
    Finished work stays, and nothing is left running.

        result = train(
            TrainConfig(run="runs/sums", model="smollm2-135m", iterations=10),
            tasks=[task(number) for number in range(1000)],
            validation_tasks=[task(number) for number in range(1000, 1032)],
        )
    """
    config, tasks, validation_tasks = checked(config, tasks, validation_tasks)
    console = Console(quiet=quiet)
    if config.cluster is not None:
        given = {
            "tasks": tasks,
            "validation_tasks": validation_tasks,
            "quiet": quiet,
            "take_over": take_over,
            # Resolve these in our environment.
            "redo": redo_asked(redo),
            "allow_changes": allowed_names(allow_changes),
        }
        return _on_cluster(config, given, console)
    config = with_local_run(config)
    what = f"{config.iterations} iteration{'s' * (config.iterations != 1)} of {config.model}"
    console.line(f"{config.run}: {what}; loading PyTorch first")
    with console.interruptible(f"the same command continues {config.run}"):
        from ttrl.loop.train import train_checked

        return train_checked(
            config,
            tasks,
            validation_tasks,
            quiet=quiet,
            allow_changes=allow_changes,
            take_over=take_over,
            redo=redo,
        )


def _on_cluster(config: TrainConfig, given: Mapping[str, object], console: Console) -> "RunResult":
    """Run the training on the cluster, and wait. Raises UserError without Ray."""
    try:
        from ttrl.cluster.lead import run_detached
    except ModuleNotFoundError as error:
        raise UserError(
            f"cluster is {config.cluster!r}, but Ray cannot be loaded ({error}): pip install "
            "'ttrl[cluster]'"
        ) from error
    if os.path.isdir(config.model):
        model = os.path.abspath(config.model)
    else:
        model = config.model
    # Other machines start in other folders.
    config = replace(config, run=os.path.abspath(config.run), model=model)
    with console.interruptible(f"the same command continues {config.run}"):
        result: RunResult = run_detached(config, _lead, {**given, "config": config}, console)
        return result


def _lead(**given: Any) -> "RunResult":
    from ttrl.loop.train import train_checked

    return train_checked(**given)

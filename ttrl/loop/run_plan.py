"""Plan a run with `plan(config, tasks)`; with `probe=True`, measure it in a short similar run."""

import functools
from collections.abc import Sequence
from pathlib import Path

from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.loop.checks import overfitted
from ttrl.plans.expected_lengths import Assumptions
from ttrl.plans.plan import Plan
from ttrl.plans.planner import make_plan
from ttrl.system.console import mistakes_in_lines
from ttrl.tasks.task import Task

__all__ = ["Assumptions", "Plan", "plan"]


@mistakes_in_lines()
def plan(
    config: TrainConfig,
    tasks: Sequence[Task] = (),
    validation_tasks: Sequence[Task] = (),
    *,
    assumptions: Assumptions | None = None,
    gpu: str | None = None,
    probe: bool = False,
    price_per_hour: float | None = None,
    recipe_only: bool = False,
    run: Path | None = None,
) -> Plan:
    """Plan a run; `print` the plan, or take its `to_dict()`.

    tasks: their prompts are counted. Without tasks, lengths are assumed (`assumptions`), or taken
        from the iterations in the folder `run`.
    gpu: the kind of GPU for the run, such as "H100", or several, "8xH100"; None: this machine.
    probe: first make a short run with a server and a trainer. Without tasks it asks for
        completions of the assumed length to made-up prompts.
    price_per_hour: of the machine, in any currency.
    recipe_only: plan only the trainer, as for a config of `recipe_configs/`.

    Raises ConfigError, ModelFolderError, UserError; with `probe`, any error of a run.

    >>> config = TrainConfig(run="runs/plan", model="Qwen/Qwen3-4B", iterations=100)
    >>> planned = plan(config, gpu="8xH100", price_per_hour=20.0)
    >>> planned.memory.peak < planned.machine.memory
    True
    """
    config, tasks, validation_tasks = overfitted(config, tasks, validation_tasks)
    planned = functools.partial(
        make_plan,
        config,
        tasks,
        validation_tasks,
        assumptions=assumptions,
        gpu=gpu,
        price_per_hour=price_per_hour,
        recipe_only=recipe_only,
        run=run,
    )
    if probe and (gpu is not None or recipe_only):
        raise UserError(
            "a probe measures whole iterations on this machine: leave out "
            + ("gpu" if gpu else "recipe_only")
        )
    if probe and (config.nnodes > 1 or config.joined_servers):
        raise UserError(
            "a probe measures only this machine: leave out nnodes and joined_servers, or plan "
            "without a probe"
        )
    made = planned()
    if not probe:
        return made
    from ttrl.loop.plan_probe import probe as run_probe

    probed = run_probe(made, config, assumptions or Assumptions(), tasks, validation_tasks)
    return planned(probed=probed)

"""Find all detectable problems of a run at once, before torch is loaded or a server started."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, ModelFolderError, TaskError, UserError, complaints
from ttrl.ready_models import is_ready
from ttrl.registries import OBJECTIVES
from ttrl.server.chat_template import read_chat_template
from ttrl.server.model_folder import check_model
from ttrl.server.vllm import own_argument_problems
from ttrl.tasks.rewards import only_evaluates
from ttrl.tasks.task import Task, task_list
from ttrl.text import counted


def checked(
    config: TrainConfig,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task],
    *,
    model: bool = True,
    problems: Sequence[str] = (),
    errors: Sequence[UserError] = (),
) -> tuple[TrainConfig, list[Task], list[Task]]:
    """Return a run's inputs, checked; with `model`, also check the model's availability. Raises
    ConfigError with all problems, including earlier ones (`errors`: of making the tasks);
    TaskError or ModelFolderError for a single such error.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            "config",
            [
                f"the config is of type {type(config).__name__}; make it with "
                "ttrl.TrainConfig(run=…, model=…)"
            ],
        )
    errors = list(errors)

    def listed(given: Sequence[Task], name: str) -> list[Task]:
        try:
            return task_list(given, name)
        except TaskError as error:
            errors.append(error)
            return []

    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    # Defaults replace wrong values, and raise no complaints.
    config, found = TrainConfig.examine(values)
    problems = list(dict.fromkeys([*problems, *found]))
    said = "\n".join(problems)
    server = {name: value for name, value in config.server.items() if name != "max_model_len"}
    problems += [f"server: extra_args: {problem}" for problem in own_argument_problems(server)]
    problems += config.local_problems()
    if not problems:
        problems += _loss_problems(config)
    if config.chat_template is not None:
        try:
            config = replace(config, chat_template=read_chat_template(config.chat_template))
        except UserError as error:
            problems.append(str(error))
    if config.sampling:
        from ttrl.rollouts.client.chat_completions import checked_parameters  # loads openai

        problems += complaints(lambda: checked_parameters(config.sampling), "sampling: ")
    if config.early_stop:
        from ttrl.rollouts.early_stop import InferenceEarlyStop

        for name in sorted(config.early_stop.keys() & {"alpha", "threshold"}):
            problems += complaints(
                functools.partial(InferenceEarlyStop, **{name: config.early_stop[name]}),
                "early_stop: ",
            )
    tasks = listed(tasks, "tasks")
    validation_tasks = listed(validation_tasks, "validation_tasks")
    problems += _overfit_problems(config, tasks)
    config, tasks, validation_tasks = overfitted(config, tasks, validation_tasks)
    if not errors:
        problems += _task_problems(config, tasks, validation_tasks, said)
    if model and config.model and not is_ready(config.model):
        try:
            check_model(config.model, chat_template=config.chat_template is None)
        except ModelFolderError as error:
            errors.append(error)
    if len(errors) == 1 and not problems:
        raise errors[0]
    if problems or errors:
        raise ConfigError("TrainConfig", problems + [str(error) for error in errors])
    return config, tasks, validation_tasks


def overfitted(
    config: TrainConfig, tasks: Sequence[Task], validation_tasks: Sequence[Task]
) -> tuple[TrainConfig, list[Task], list[Task]]:
    """Return the config and tasks of a run with `overfit`: the first tasks, for training and for
    validation. Without it, return them as they are.
    """
    if config.overfit is None or not tasks:
        return config, list(tasks), list(validation_tasks)
    few = [replace(task, level=0) for task in tasks[: config.overfit]]
    size = min(config.tasks_per_iteration, config.overfit)
    return replace(config, tasks_per_iteration=size), few, list(few)


def _overfit_problems(config: TrainConfig, tasks: list[Task]) -> list[str]:
    if config.overfit is None or not 0 < len(tasks) < config.overfit:
        return []
    return [
        f"overfit is {config.overfit}, and there are {counted(len(tasks), 'task')}; give a number "
        f"from 1 to {len(tasks)}"
    ]


def _loss_problems(config: TrainConfig) -> list[str]:
    """Return the problems of another package's policy loss. ttrl's own are right."""
    recipe = config.recipe_config({})
    if OBJECTIVES.is_own(recipe.objective):
        return []
    from ttrl.training.objective.objective import objective_from  # loads PyTorch

    return complaints(lambda: objective_from(recipe), "training: ")


def _task_problems(
    config: TrainConfig, tasks: list[Task], validation_tasks: list[Task], said: str
) -> list[str]:
    found = []
    if not tasks:
        found.append("there are no tasks to train on")
    elif "tasks_per_iteration is" not in said:
        lowest = min(task.level for task in tasks)
        first = [task for task in tasks if task.level == lowest]
        there = f"there {'is' if len(tasks) == 1 else 'are'} only {counted(len(tasks), 'task')}"
        if len(first) < len(tasks):
            there = (
                f"the lowest level, the first of the run, has only {counted(len(first), 'task')}"
            )
        if len(first) < config.tasks_per_iteration:
            found.append(f"tasks_per_iteration is {config.tasks_per_iteration}, but {there}")
    untrainable = [
        (task, why)
        for task in tasks
        if (why := only_evaluates(task.grader, task.group_grader, task.rollout))
    ]
    if untrainable:
        count, (one, why) = len(untrainable), untrainable[0]
        found.append(
            f"{count} of {len(tasks)} tasks (such as {one.id!r}) are for evaluation only: {why}; "
            "give them as validation_tasks, or to `ttrl eval`"
        )
    if config.tokens_per_iteration is not None and (
        several := [task.id for task in tasks if task.rollout]
    ):
        found.append(
            f"tokens_per_iteration is {config.tokens_per_iteration}, but {len(several)} of "
            f"{len(tasks)} tasks have a rollout (such as {several[0]!r}), and a budget cannot cut "
            "off a conversation and continue it later. Leave tokens_per_iteration out, and limit "
            "rollouts with Task(limits=RolloutLimits(tokens=…))"
        )
    if config.stop_at is not None and not validation_tasks:
        found.append("stop_at needs validation tasks")
    return found

"""Provide the common parts of the scripts in recipes/: options, a warm start of a tiny model, a
try-out, closing lines.

A recipe is a script for reading from top to bottom: config, tasks, and `run_recipe`. This is
`train(config, tasks=…, validation_tasks=…)` and a line about the result, unless an option asks
otherwise. `--check` makes its tasks and checks its config and the availability of its model.
`--tiny` runs it for an iteration with a tiny random model on the few shortest tasks: it learns
nothing, but every part of the recipe has run. A random model's answers are all wrong, and equal
rewards train nothing, so chance is added to them there.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrl.cli.plan_command import PlanOptions
from ttrl.cli.recipe_files import add_settings
from ttrl.cli.settings import settings_in, with_settings
from ttrl.configs.base import Settings
from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, TaskError, TtrlError
from ttrl.launch.tune import tune
from ttrl.loop.checks import checked
from ttrl.loop.start import train
from ttrl.messages import text_of
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.metrics import validation_metric
from ttrl.run_folder.reader import held_out_text
from ttrl.server.model_folder import chat_templates_of
from ttrl.system.console import errors_in_lines, note, speak_in_lines
from ttrl.system.files import atomic_folder, write_jsonl
from ttrl.tasks.task import Grade, Task
from ttrl.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from ttrl.plans.plan import Plan

_BY_OPTION = ("run", "seed")
"""Settings also read by recipes; --set would change them for the run only."""
_ALSO_OPTIONS = ("model", "iterations", "overfit", "weight_sync", "cluster", "nproc_per_node")
"""Settings with both an option and --set; --set changes them as the option does."""
_PLAIN_TEMPLATE = (
    "{%- for message in messages -%}{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{%- endfor -%}"
)
_OF_LARGE_MACHINES = ("compile", "cpu_offload", "row_length_multiple")
"""Settings of the trainer without a use for a tiny model."""
_PROBED = PlanOptions(probe=True)
_TINY_CONTEXT = 16_384
_TINY_TASKS = 2
_TINY_TOKENS = 8


def script_arguments(
    description: str | None,
    *,
    run: str,
    iterations: int,
    model: str | None = None,
    data: str | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Read the command line of a recipe: run folder, seed, iterations, any other setting; with
    `model`, also a model ("" if the recipe makes its own); with `data`, also data ("" for data
    without a default); with `presets`, settings of an experiment by its name, overridden one by one
    by options and --set; `options` adds more. argv: its arguments, if not those of this process.
    Raises ConfigError if --set contradicts another option.

    `run` of the result is absolute; for a recipe with a model not its own, the result has `tiny`;
    `given` names the options of settings that are on the command line.
    `task_seed` is for the training tasks: the seed, or with `overfit` 0, so that all seeds train on
    the same ones.

        arguments = script_arguments("Sums.", run="runs/sums", iterations=20, model="smollm2-135m")
        print(arguments.run, arguments.model, arguments.iterations)
    """
    speak_in_lines()
    errors_in_lines(TtrlError, KeyboardInterrupt)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, default=Path(run), help=f"the run folder (default: {run})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--iterations", type=int, default=iterations, help=f"at most ({iterations})"
    )
    parser.add_argument(
        "--weight-sync", choices=("auto", "reload", "restart", "sleep", "memory"), default="auto"
    )
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT",
    )
    parser.add_argument(
        "--nproc-per-node", type=int, help="trainer processes (default: one per GPU)"
    )
    if model is not None:
        shown = model or "a tiny one, made and warmed up first"
        parser.add_argument(
            "--model",
            default=model,
            help=f"a model folder, a name of `ttrl models` or on the hub ({shown})",
        )
    if model:
        parser.add_argument(
            "--tiny",
            action="store_true",
            help="try it out: one iteration of a tiny random model, on any machine",
        )
    if data is not None:
        shown = f" ({data})" if data else ""
        parser.add_argument(
            "--data",
            default=data or None,
            required=not data,
            help=f"a file, a folder, or a data set's name on the hub{shown}",
        )
    same = "train on the first N tasks alone, and ask them greedily after each step; --set prevails"
    parser.add_argument("--overfit", type=int, metavar="N", help=same)
    if presets:
        parser.add_argument(
            "--preset",
            choices=presets,
            metavar="NAME",
            help=f"use the settings of an experiment: {', '.join(presets)}; see docs/reference/"
            "experiments.md and families.md",
        )
    others = "other settings of the run or of ttrl/grpo_recipe: lr=1e-6 nnodes=2"
    add_settings(parser, others)
    parser.add_argument(
        "--check", action="store_true", help="make the tasks and check the settings, without a run"
    )
    how = "plan the run by a short one; `ttrl plan SCRIPT` plans without"
    parser.add_argument(
        "--plan", nargs="?", const=_PROBED, type=PlanOptions.parse, metavar="", help=how
    )
    if options is not None:
        options(parser)
    arguments = _parsed(parser, argv)
    problems = _contradictions(arguments)
    if problems:
        raise ConfigError("arguments", problems)
    if model is not None:
        _take_model(arguments)
    _take_overfit(arguments)
    chosen = (presets or {}).get(getattr(arguments, "preset", None) or "", {})
    implied = _take_preset(arguments, chosen)
    # Seeds of a sweep are compared on their training tasks, so these must be the same.
    arguments.task_seed = arguments.seed if arguments.overfit is None else 0
    implied += [
        _written(name, value) for name, value in _overfit_settings(arguments.overfit).items()
    ]
    if arguments.cluster is not None:
        arguments.set.append(f"cluster={json.dumps(arguments.cluster)}")
    arguments.own_set = arguments.set
    arguments.set = implied + arguments.own_set
    arguments.run = arguments.run.absolute()
    if arguments.plan is not None and arguments.check:
        arguments.plan = dataclasses.replace(arguments.plan, probe=False)
    if arguments.plan is not None and not arguments.plan.probe:
        arguments.check = True  # such a plan needs no model made by the recipe first
    note(f"{parser.prog}: making the tasks")
    return arguments


def recipe_config(arguments: argparse.Namespace, **settings: Any) -> TrainConfig:
    """Return the config of a recipe: the options of its command line, and its own settings."""
    options = ("model", "iterations", "seed", "weight_sync", "nproc_per_node")
    given = {name: value for name, value in vars(arguments).items() if name in options}
    return TrainConfig(run=str(arguments.run), **(given | settings))


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. `given`: the options of settings on the command line, also those
    with their default values.
    """
    defaults = {name: parser.get_default(name) for name in _ALSO_OPTIONS}
    filled = {name: value for name, value in defaults.items() if value is not None}
    # argparse gives no default to an attribute that is there already.
    arguments = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(filled)))
    arguments.given = {name for name in defaults if getattr(arguments, name, None) is not None}
    for name in filled.keys() - arguments.given:
        setattr(arguments, name, filled[name])
    return arguments


def _contradictions(arguments: argparse.Namespace) -> list[str]:
    """Return contradictions between --set, --tiny and other options, and misspelled names in
    --set.
    """
    given, misspelled = settings_in(arguments.set)
    found = []
    if getattr(arguments, "tiny", False) and ("model" in arguments.given or "model" in given):
        found.append("--tiny makes a model of its own; leave it out, or the model")
    for name in given.keys() & vars(arguments).keys():
        own = getattr(arguments, name)
        option = f"--{name.replace('_', '-')}"
        if str(own) == str(given[name]):
            continue
        if name in _BY_OPTION:
            why = "the recipe uses it, too"
            found.append(
                f"--set {_written(name, given[name])}: write {option} instead, because {why}"
            )
        elif name in arguments.given:
            both = f"{option} is {own}, but --set sets {_written(name, given[name])}"
            found.append(f"{both}; leave one out")
    if not found:
        return []
    return [*sorted(found), *misspelled]


def _take_preset(arguments: argparse.Namespace, chosen: Mapping[str, Any]) -> list[str]:
    """Take a preset's options, unless the command line has its own; return its settings, as for
    --set.
    """
    others = dict(chosen)
    for name in _ALSO_OPTIONS:
        if name in others and hasattr(arguments, name):
            value = others.pop(name)
            if name not in arguments.given:
                setattr(arguments, name, value)
    return [f"{name}={json.dumps(value)}" for name, value in others.items()]


def _take_model(arguments: argparse.Namespace) -> None:
    """Move a model in --set to the option; recipes read it themselves."""
    given = settings_in(arguments.set)[0].get("model")
    if given is not None:
        arguments.model = str(given)
        arguments.given.add("model")
    arguments.set = [text for text in arguments.set if text.partition("=")[0] != "model"]


def _take_overfit(arguments: argparse.Namespace) -> None:
    """Move `overfit` in --set to the option: it means further settings, and recipes read it."""
    given = settings_in(arguments.set)[0].get("overfit")
    if type(given) is not int:
        return  # a wrong value is reported with all other problems
    arguments.overfit = given
    arguments.given.add("overfit")
    arguments.set = [text for text in arguments.set if text.partition("=")[0] != "overfit"]


def _written(name: str, value: Any) -> str:
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str)
    return f"{name}={text}"


def _overfit_settings(count: int | None) -> Settings:
    """Return the settings behind --overfit: no other tasks, all of them in each iteration, and
    greedy answers to them after each step.
    """
    if count is None:
        return {}
    return {
        "overfit": count,
        "tasks_per_iteration": count,
        "dynamic_sampling": None,
        "max_extra_tasks": None,
        "curriculum": False,
        "validate_every": 1,
        "validation_samples": 1,
        "validation_temperature": 0.0,
        "stop_at": None,
    }


def supervised_start(
    folder: Path,
    examples: Iterable[Mapping[str, Any]],
    *,
    steps: int,
    batch_size: int,
    seed: int = 0,
    seq_len: int = 128,
    lr: float = 1e-3,
    rows_per_microbatch: int = 64,
    model: str | os.PathLike[str] | None = None,
) -> Path:
    """Train a model on `examples` ({"messages": …}) for a fixed number of supervised steps.

    model: a folder, a name of `ttrl models` or on the hub; None: a tiny one with random weights,
    made here. Returns the folder of the trained model. It is made once, and found there again
    afterwards.
    """
    if not (folder / "checkpoint" / "config.json").exists():
        print(f"warming a model up with {steps} supervised steps; log: {folder / 'train.log'}")
        write_jsonl(folder / "examples.jsonl", [dict(one) for one in examples])
        if model is None:
            model = make_tiny_model(folder / "random_model", seed=seed)
        else:
            from ttrl.loop.train import local_model  # loads PyTorch

            model = local_model(str(model))
        config = {
            "model": str(model),
            "data": str(folder / "examples.jsonl"),
            "output_dir": str(folder),
            "steps": steps,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "lr": lr,
            "seed": seed,
            "rows_per_microbatch": rows_per_microbatch,
            "num_output_chunks": 1,
        }
        tune(config, folder / "sft.yaml", recipe="ttrl/sft_recipe", pbar_desc="warm start")
    return folder / "checkpoint"


def with_plain_template(model: str, folder: Path) -> Path:
    """Return the folder of a model with a chat template. For a base model without one, return
    `folder`: links to its files, and a template writing only the texts, with an end after each
    answer. Raises ModelFolderError.
    """
    from ttrl.loop.train import local_model  # loads PyTorch

    source = local_model(model, chat_template=False)
    if chat_templates_of(source):
        return source
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            for path in source.iterdir():
                (temporary / path.name).symlink_to(path.resolve())
            (temporary / "chat_template.jinja").write_text(_PLAIN_TEMPLATE, encoding="utf-8")
    return folder


@contextlib.contextmanager
def mistakes_together(arguments: argparse.Namespace, config: TrainConfig) -> Iterator[None]:
    """Report faults in the data, found while tasks are made here, together with faults in settings
    and model.
    """
    try:
        yield
    except TaskError as error:
        config, problems = with_settings(config, arguments.set)
        checked(config, (), (), model=_is_to_be_had(arguments), problems=problems, errors=[error])


def _is_to_be_had(arguments: argparse.Namespace) -> bool:
    """Tell whether the model must already exist, rather than come from the recipe."""
    return bool(getattr(arguments, "model", None)) and not getattr(arguments, "tiny", False)


def run_recipe(
    arguments: argparse.Namespace,
    config: TrainConfig,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task],
    what: str,
    *,
    start: Callable[[], Path] | None = None,
) -> str:
    """Train; return `what` of the held-out tasks before and after, and the place of the results.

    start: makes the first model, such as by a supervised warm start, and returns its folder. It is
    called once all else is checked, unless `--set model=…` or --tiny give another model.

    With --check, only check; with --tiny, try the recipe out (other options prevail over its
    settings, and a model is refused). Raises the errors of `train`.

        def task(number: int) -> Task:
            question = f"What is {number} + 1? Answer with the number."
            return Task(
                [{"role": "user", "content": question}],
                lambda choice: float(choice.message.content == str(number + 1)),
            )

        arguments = script_arguments("Sums.", run="runs/sums", iterations=20, model="smollm2-135m")
        config = TrainConfig(
            run=arguments.run, model=arguments.model, iterations=arguments.iterations, max_tokens=16
        )
        tasks = [task(number) for number in range(100)]
        print(run_recipe(arguments, config, tasks[:84], tasks[84:], what="right sums"))
    """
    own_model = config.model
    config, problems = with_settings(config, getattr(arguments, "set", ()))
    if getattr(arguments, "tiny", False):
        config, tasks, validation_tasks = _tiny(arguments, config, tasks, validation_tasks)
        config, _ = with_settings(config, arguments.own_set)
    if config.overfit is not None:
        what = f"{what} on the {config.overfit} training tasks"
    asked: PlanOptions | None = arguments.plan
    if arguments.check or problems:
        is_planned = asked is not None and not problems
        # A plan without a probe, which is a check too, knows published models by their names.
        is_rough = asked is not None and arguments.check
        needed = _is_to_be_had(arguments) and not is_rough
        config, tasks, validation_tasks = checked(
            config, tasks, validation_tasks, model=needed, problems=problems
        )
        if is_planned:
            assert asked is not None
            return asked.text(rough_plan(arguments, config, tasks, validation_tasks))
        longest = max(_prompt_size(task) for task in tasks)
        prompts = f"the longest prompt has {longest:,} bytes"
        held_out = f"{len(validation_tasks)} held out"
        if not validation_tasks:
            held_out = "no held-out tasks, so nothing will measure the policy on others"
        return f"{len(tasks)} tasks ({prompts}), {held_out}; the settings are right"
    if start is not None and config.model == own_model:
        checked(config, tasks, validation_tasks, model=False)
        config = dataclasses.replace(config, model=str(start()))
    if asked is not None:
        note("planning, with a short run to measure (a minute or two)")
        made = asked.plan(config, tasks, validation_tasks)
        made.save(Path(config.run))  # the run's report compares it with the results
        return asked.text(made)
    result = train(config, tasks=tasks, validation_tasks=validation_tasks)
    metrics = RunFolder(result.run).metrics()
    rows = [row for row in metrics if validation_metric(row, config) is not None]
    if rows:
        before, after = (
            held_out_text(row, config.validation_metric) for row in (rows[0], rows[-1])
        )
        change = f"{before} before, {after} after"
    elif not validation_tasks and config.overfit is None:
        change = "not measured, without held-out tasks, in"
    else:
        change = "not known after"
    iterations = metrics[-1].iteration
    if config.overfit is None and validation_tasks:
        what = f"held-out {what}"
    if getattr(arguments, "tiny", False):
        what = f"tried out, with random rewards added for training\n{what}"
    return f"{what}: {change} {iterations} iteration{'s' * (iterations != 1)}"


def rough_plan(
    arguments: argparse.Namespace,
    config: TrainConfig,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task],
) -> "Plan":
    """Plan without running anything. A model made from a tiny one by the recipe has its shape."""
    asked: PlanOptions = arguments.plan
    made_first = not _is_to_be_had(arguments) and not Path(config.model).exists()
    with tempfile.TemporaryDirectory(prefix="ttrl-plan-") as scratch:
        planned = config
        if made_first:
            model = make_tiny_model(Path(scratch, "model"))
            planned = dataclasses.replace(config, model=str(model))
        made = asked.plan(planned, tasks, validation_tasks)
    return dataclasses.replace(made, model=config.model)


def _prompt_size(task: Task) -> int:
    """Return the bytes of a task's messages."""
    return sum(len(text_of(message.get("content")).encode()) for message in task.messages)


def _tiny(
    arguments: argparse.Namespace,
    config: TrainConfig,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task],
) -> tuple[TrainConfig, list[Task], list[Task]]:
    """Shrink the recipe; options of the command line prevail. A byte is a token of the tiny model,
    so the shortest tasks are taken.
    """
    folder = Path(config.run) / "tiny_model"
    if not arguments.check and not (folder / "config.json").exists():
        make_tiny_model(
            folder, seed=config.seed, layers=2, width=64, heads=2, context=_TINY_CONTEXT
        )
    training = {
        name: value
        for name, value in config.recipe_settings.items()
        if name not in _OF_LARGE_MACHINES
    }
    training["rows_per_microbatch"] = 1
    count = _TINY_TASKS
    if "overfit" in arguments.given and config.overfit is not None:
        count = config.overfit
    small: dict[str, Any] = {
        "tasks_per_iteration": count,
        "samples_per_task": 4,
        "max_tokens": _TINY_TOKENS,
        "seq_len": _TINY_CONTEXT,
        "model": str(folder),
        "iterations": min(config.iterations, 1),
        "training": training,
        "nproc_per_node": 1,
        "server": {},
    }
    if config.overfit is not None:
        small |= _overfit_settings(count)
    small |= {name: getattr(config, name) for name in small.keys() & arguments.given}
    few = sorted(tasks, key=_prompt_size)[:count]
    held_out = sorted(validation_tasks, key=_prompt_size)[:_TINY_TASKS]
    made = dataclasses.replace(config, **small)
    return made, [_graded_by_chance(task) for task in few], held_out


def _graded_by_chance(task: Task) -> Task:
    """Return the task with a number from 0 to 1 added to its rewards, a different one for every
    reply.
    """
    grader = task.grader
    assert grader is not None, "a recipe with --tiny asks for one reply"

    async def grade(choice: "Choice") -> Grade:
        output = grader(choice)
        right = Grade.of(await output if inspect.isawaitable(output) else output, task.id)
        return Grade(
            right.reward
            + zlib.crc32((choice.message.content or "").encode(errors="replace")) / 2**32,
            right.metrics,
        )

    return dataclasses.replace(task, grader=grade, level=0)

"""Read settings in files and on command lines: of a run, of a recipe, of a model."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ttrl.configs import GRPOConfig
from ttrl.configs.base import Settings
from ttrl.configs.recipe import OTHER_NAMES
from ttrl.configs.run import SET_BY_THE_LOOP, TrainConfig
from ttrl.errors import ConfigError, UserError
from ttrl.evaluation.families import tasks_named
from ttrl.tasks.task import Task

_OF_RUN = TrainConfig.names()
_OF_RECIPE = GRPOConfig.names()
_SPLITS = {"tasks": "train", "validation_tasks": "validation"}
_OF_THE_MACHINE = ("device", "dtype", "num_threads", "trainer_memory")
"""Settings recorded in a run's config.yaml as decided by the machine."""
_OF_ARMS = frozenset(
    {
        "model",
        "seed",
        "data",
        "held_out",
        "output_dir",
        "steps",
        "flops",
        "state",
        "save_state",
        "device",
        "dtype",
        "num_threads",
    }
)
"""Settings of supervised training that a comparison of arms sets itself."""


@dataclass(frozen=True)
class Planned:
    """Hold the subject of `ttrl plan`."""

    config: TrainConfig
    run: Path | None = None
    """The config's run folder."""
    recipe_only: bool = False
    """Whether it is a config of the recipe; its plan covers only the trainer."""
    tasks: list[Task] = field(default_factory=list)
    validation_tasks: list[Task] = field(default_factory=list)


def read_planned(
    path: Path,
    settings: Sequence[str] = (),
    *,
    elsewhere: bool = False,
    with_tasks: bool = True,
) -> Planned:
    """Read a run folder, a file of a run's or a recipe's settings, a model folder, or config.json.

    settings: "KEY=VALUE", of the run or else of the recipe. elsewhere: for another machine; its
    defaults replace the machine's own settings in a run folder's config.yaml. with_tasks: make the
    tasks named in a file.

    Raises UserError, ConfigError, TaskError.
    """
    is_run = (path / "config.yaml").is_file()
    is_model = not is_run and (path / "config.json").is_file()
    if is_model or path.suffix == ".json":
        return Planned(model_run(str(path), settings))
    file = path / "config.yaml" if path.is_dir() else path
    values = _read_mapping(file)
    if not values.keys() & {"iterations", "tasks_per_iteration", "tasks"}:
        changes = _known(settings)
        if not values.keys() & _OF_RECIPE:
            raise UserError(
                f"{file} has no setting of a run or of a recipe; `ttrl config` lists them"
            )
        return Planned(_of_recipe({**_promised(file), **values, **changes}, file), recipe_only=True)
    if (file.parent / "iterations").is_dir():
        run = file.parent
    else:
        run = None
    if run is not None and (elsewhere or "device" in settings_in(settings)[0]):
        values |= {name: TrainConfig.defaults()[name] for name in _OF_THE_MACHINE}
    if not with_tasks:
        values = {name: value for name, value in values.items() if name not in _SPLITS}
    config, tasks, validation_tasks, problems, errors = _examined(values, path, settings)
    if len(errors) == 1 and not problems:
        raise errors[0]
    if problems or errors:
        problems += config.absent()
        raise ConfigError(str(file), problems + [str(error) for error in errors])
    return Planned(config, run, tasks=tasks, validation_tasks=validation_tasks)


def model_run(model: str, settings: Sequence[str] = ()) -> TrainConfig:
    """Return a run of one iteration of a model, with defaults for anything not in `settings`: those
    of every run, but no longer than the model's context.

    Raises ConfigError for unknown settings, ModelFolderError.
    """
    changes = _known(settings)
    values: dict[str, object] = {"run": f"runs/{Path(model).name}", "model": model, "iterations": 1}
    if not changes.keys() & {"seq_len", "max_tokens"}:
        from ttrl.plans.planner import context_of  # loads PyTorch

        usual = TrainConfig.defaults()
        context = context_of(str(changes.get("model", model)))
        if context is not None and context < usual["seq_len"]:
            values["seq_len"] = context
            values["max_tokens"] = min(usual["max_tokens"], context // 3)
    return TrainConfig.parse(_changed(values, changes), "--set")


def _known(settings: Sequence[str]) -> Settings:
    """Return the settings in "KEY=VALUE" texts. Raises ConfigError for unknown ones."""
    changes, unknown = settings_in(settings)
    if unknown:
        raise ConfigError("--set", unknown)
    return changes


def _read_mapping(file: Path) -> dict[str, Any]:
    """Read a YAML file of settings. Raises UserError."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read as a config: {error}") from error
    if values is None:  # an empty file lacks everything
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{file} holds a {type(values).__name__}; write a mapping of settings")
    return values


def _promised(file: Path) -> Settings:
    """Return the content of the first line of a file of recipe_configs/: "# 16 x 141 GB GPU in 2
    machines; rows of up to 8192 …".
    """
    with file.open(encoding="utf-8") as lines:
        first = lines.readline()
    found: dict[str, int | str] = {}
    rows = re.search(r"rows of up to (\d+) positions", first)
    if rows:
        found["seq_len"] = int(rows[1])
    gpus = re.match(r"# (\d+) x \d+ GB GPU(?: in (\d+) machines)?", first)
    if gpus:
        nodes = int(gpus[2] or 1)
        found["nproc_per_node"] = int(gpus[1]) // nodes
        if nodes > 1:
            found |= {"nnodes": nodes, "cluster": "auto"}
    return found


Examined: TypeAlias = tuple[TrainConfig, list[Task], list[Task], list[str], list[UserError]]
"""Config, tasks, validation tasks, faults of settings, one line each, faults of tasks."""


def read_run(path: Path, settings: Sequence[str]) -> Examined:
    """Read a run's settings and tasks, with all of their faults.

    settings: "KEY=VALUE"; they prevail over the file's. Without `run` in the file, the run folder
    is runs/ and the file's name. Raises UserError for an unreadable file.
    """
    values = _read_mapping(path)
    config, tasks, validation_tasks, problems, errors = _examined(values, path, settings)
    if values.get("tasks") is None:
        errors.append(
            UserError(
                f"{path} names no tasks; write tasks: FILE.py, or a family of `ttrl eval` such as "
                "structured_output"
            )
        )
    return config, tasks, validation_tasks, problems + config.absent(), errors


def _examined(values: Settings, path: Path, settings: Sequence[str]) -> Examined:
    """Examine the values of a run's file and make its tasks; `settings` prevail over the file's.
    Without `run` in the file, the run folder is runs/ and the file's name.
    """
    changes, problems = settings_in(settings)
    own = {name: value for name, value in values.items() if name not in _SPLITS}
    config, found = TrainConfig.examine(_changed({"run": f"runs/{path.stem}", **own}, changes))
    tasks: dict[str, list[Task]] = {}
    errors: list[UserError] = []
    for key, split in _SPLITS.items():
        tasks[key] = []
        name = values.get(key)
        if isinstance(name, str):
            try:
                tasks[key] = tasks_named(name, split, seed=config.seed)
            except UserError as error:
                errors.append(error)
        elif name is not None:
            known = "a family of `ttrl eval`, FILE.py or FILE.py:NAME"
            errors.append(UserError(f"{key} is {name!r}; name {known}"))
    return config, tasks["tasks"], tasks["validation_tasks"], problems + found, errors


def with_settings(config: TrainConfig, settings: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """Return the config with other settings, "KEY=VALUE" of the run or else of the recipe, and the
    faults of the result, one line each.
    """
    changes, unknown = settings_in(settings)
    config, found = TrainConfig.examine(_changed(config.to_dict(), changes))
    return config, unknown + found


def settings_in(texts: Sequence[str]) -> tuple[Settings, list[str]]:
    """Return the settings in "KEY=VALUE" texts, and a problem for each unknown text."""
    changes: dict[str, object] = {}
    unknown: list[str] = []
    for text in texts:
        try:
            changes.update([_setting(text)])
        except UserError as error:
            unknown.append(str(error))
    known = _OF_RUN | _OF_RECIPE
    for name in sorted(changes.keys() - known):
        near = (
            OTHER_NAMES.get(name)
            or TrainConfig.elsewhere(name)
            or next(iter(difflib.get_close_matches(name, known, n=1)), "")
        )
        hint = (
            f"; write {near}"
            if "=" in near
            else f"; did you mean {near!r}?"
            if near
            else "; `ttrl config` lists all"
        )
        unknown.append(f"neither a run nor a recipe has a setting {name!r}{hint}")
    return {name: value for name, value in changes.items() if name in known}, unknown


def sft_settings_in(texts: Sequence[str]) -> tuple[Settings, list[str]]:
    """Return the settings of supervised training in "KEY=VALUE" texts, and a problem for each text
    that is none, or that a comparison of arms sets itself.
    """
    found: list[tuple[str, Any]] = []
    problems = []
    for text in texts:
        try:
            name, value = _setting(text)
        except UserError as error:
            problems.append(str(error))
            continue
        if name in _OF_ARMS:
            problems.append(f"{name} is the same for all arms, or follows from RL's; leave it out")
        else:
            found.append((name, value))
    return dict(found), problems


def _changed(values: Settings, changes: Settings) -> Settings:
    values = {**values, **{name: changes[name] for name in changes if name in _OF_RUN}}
    training = {name: value for name, value in changes.items() if name not in _OF_RUN}
    return {**values, "training": {**(values.get("training") or {}), **training}}


def _of_recipe(values: Settings, file: Path) -> TrainConfig:
    """Make a run around a recipe's config; its plan covers only the trainer."""
    if not values.get("model"):
        raise UserError(
            f"{file} names no model; set one: --set model=FOLDER, a config.json, or a name on the "
            "hub"
        )
    missing = {"packed": "", "output_dir": ""}
    alone = {
        name: value for name, value in values.items() if name in _OF_RECIPE or name not in _OF_RUN
    }
    GRPOConfig.parse(missing | alone, str(file))
    training = {
        name: value
        for name, value in values.items()
        if name in _OF_RECIPE and name not in SET_BY_THE_LOOP
    }
    run = {name: value for name, value in values.items() if name in _OF_RUN and name != "training"}
    return TrainConfig.parse({"run": "", "iterations": 1, **run, "training": training}, str(file))


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals and name in _OF_RUN | _OF_RECIPE:
        raise UserError(f"{name} has no value; write --set {name}=VALUE, without a blank")
    if not equals or not name:
        raise UserError(f"{text!r} is not a setting; write --set KEY=VALUE, such as lora_rank=16")
    name = name.removeprefix("training.")  # as config.yaml has it
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value.strip()):
        return name, float(value)  # YAML 1.1 takes 1e-6 for a word
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"{text!r}: {value!r} cannot be read: {error}") from error

"""The task families by name, and what one asks for on a command line: `gsm8k`, `mmlu=data/mmlu`,
`reasoning_gym:chain_sum@train`.

Each family is a function of `ttrl.tasks` (see docs/reference/tasks.md), or of an adapter in
`ttrl.agents` to a package that has many; nothing of it is imported before it is asked for.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.errors import UserError
from ttrl.tasks.reference import load_tasks
from ttrl.tasks.task import Task

GENERATED_BY_DEFAULT = 200
"""Tasks of generated families where nobody says how many."""


@dataclass(frozen=True)
class Family:
    """One line of the table of families."""

    home: str
    """module:function below ttrl.tasks, or below ttrl.agents where `example` is set."""
    score: str
    """What counts as right: the metric whose mean is called the accuracy, or "reward"."""
    split: str = "validation"
    """Where nobody names one."""
    data: str | None = None
    """None: generated, no data needed; else the data set on the hub, or "" where there is none that
    could be taken by default.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Given to the function."""
    example: str = ""
    """One of the names of which this family has many: NAME in FAMILY:NAME, the function's first
    argument.
    """

    @property
    def function(self) -> Callable[..., list[Task]]:
        """Import the family's function, `get_..._tasks`."""
        module, _, name = self.home.partition(":")
        room = "agents" if self.example else "tasks"
        function: Callable[..., list[Task]] = getattr(
            importlib.import_module(f"ttrl.{room}.{module}"), name
        )
        return function


FAMILIES: dict[str, Family] = {
    "gsm8k": Family("gsm8k:get_gsm8k_tasks", "exact", "test", "openai/gsm8k"),
    "math": Family("math:get_math_tasks", "exact", "test", "DigitalLearningGmbH/MATH-lighteval"),
    "aime": Family("math:get_aime_tasks", "exact", "test", "HuggingFaceH4/aime_2024"),
    "dapo": Family("math:get_dapo_tasks", "exact", data="BytedTsinghua-SIA/DAPO-Math-17k"),
    "mmlu": Family("multiple_choice:get_mmlu_tasks", "reward", "test", "cais/mmlu"),
    "arc_challenge": Family(
        "multiple_choice:get_arc_tasks", "reward", "test", "allenai/ai2_arc", {"challenge": True}
    ),
    "arc_easy": Family(
        "multiple_choice:get_arc_tasks", "reward", "test", "allenai/ai2_arc", {"challenge": False}
    ),
    "humaneval": Family(
        "humaneval:get_humaneval_tasks", "reward", "test", "openai/openai_humaneval"
    ),
    "arc_agi": Family("arc_agi:get_arc_agi_tasks", "exact", "test", ""),
    "nyt_connections": Family("nyt_connections:get_nyt_connections_tasks", "exact", "test", ""),
    "chess": Family("chess_moves:get_chess_tasks", "best", "test", ""),
    "temporal_clue": Family("temporal_clue:get_temporal_clue_tasks", "accuracy"),
    "zebra_grid": Family("zebra_grid:get_zebra_grid_tasks", "solved"),
    "countdown": Family("countdown:get_countdown_tasks", "exact"),
    "letter_counting": Family("letter_counting:get_letter_counting_tasks", "exact"),
    "sort_letters": Family("sort_letters:get_sort_letters_tasks", "exact"),
    "structured_output": Family("structured_output:get_structured_output_tasks", "exact"),
    "spelling": Family("spelling:get_spelling_tasks", "exact"),
    "reasoning_gym": Family("reasoning_gym:get_reasoning_gym_tasks", "exact", example="chain_sum"),
    "inspect_ai": Family("inspect:get_inspect_tasks", "reward", "test", example="package/task"),
    "openenv": Family("openenv:get_openenv_tasks", "reward", example="http://127.0.0.1:8000"),
    "textarena": Family("textarena:get_textarena_tasks", "reward", example="TowerOfHanoi-v0"),
    "verifiers": Family("verifiers:get_verifiers_tasks", "reward", example="gsm8k-v1"),
}
_HELD_OUT_TASKS = 64
_TRAINING_TASKS = 1024
"""Tasks of generated families to train on."""
_MAY_LOAD = ("temporal_clue", "zebra_grid", "spelling")  # generated, or from a file that is given
_SPEC = re.compile(r"([A-Za-z0-9_-]+)(?::([^@=\s]+))?(?:@([A-Za-z0-9_-]+))?(?:=(.+))?")
_GIVEN_ELSEWHERE = ("name", "server", "split", "n", "seed", "path")


@dataclass(frozen=True)
class TaskSpec:
    """What one asks for: FAMILY[:NAME][@SPLIT][=PATH]. Raises UserError for an unknown family, a
    name or path that it cannot have."""

    family: str
    split: str
    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> "TaskSpec":
        """Parse text. Dashes and underscores are the same in names."""
        match = _SPEC.fullmatch(text.strip())
        name = match[1].replace("-", "_") if match else ""
        if match is None or name not in FAMILIES:
            raise UserError(
                f"no tasks named {text!r}; give FAMILY, FAMILY@SPLIT, FAMILY=PATH (a file, a "
                "folder, or a data set's name on the "
                f"hub), or a file of your own, FILE.py; families: {', '.join(sorted(FAMILIES))}"
            )
        family = FAMILIES[name]
        if family.example and match[2] is None:
            raise UserError(f"{name} has many families; name one, such as {name}:{family.example}")
        if match[2] is not None and not family.example:
            raise UserError(f"{name} is one family; leave :{match[2]} out")
        if match[4] is None and family.data == "":
            raise UserError(
                f"{name} needs data: {name}=PATH, a file, a folder, or a data set's name on the hub"
            )
        if match[4] is not None and family.data is None and name not in _MAY_LOAD:
            raise UserError(f"{name} is generated, not loaded; leave ={match[4]} out")
        return cls(name, match[3] or family.split, match[4], name=match[2] or "")

    def with_option(self, name: str, value: Any) -> "TaskSpec":
        """Add an argument for the family's function. Raises UserError for one that it does not
        have.
        """
        parameters = inspect.signature(FAMILIES[self.family].function).parameters
        known = [one for one in parameters if one not in _GIVEN_ELSEWHERE]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if name in _GIVEN_ELSEWHERE or (name not in known and not takes_any):
            raise UserError(f"{self.family} has no option {name!r}; it has {', '.join(known)}")
        return dataclasses.replace(self, options={**self.options, name: value})

    def __str__(self) -> str:
        family = FAMILIES[self.family]
        if self.split != family.split:
            split = f"@{self.split}"
        else:
            split = ""
        name = f":{self.name}" if self.name else ""
        return f"{self.family}{name}{split}" + (f"={self.path}" if self.path is not None else "")

    def tasks(self, n: int | None, seed: int = 0) -> list[Task]:
        """Return the tasks: at most `n` where they are loaded (None: all), else exactly `n` (None:
        GENERATED_BY_DEFAULT).

        Raises TaskError, and UserError for options of the wrong type.
        """
        family = FAMILIES[self.family]
        path = self.path if self.path is not None else family.data
        arguments: dict[str, Any] = {**family.options, **self.options}
        if path is not None:
            arguments["path"] = path
        made = path is None or (self.family == "spelling")
        try:
            if family.example:
                return family.function(
                    self.name,
                    self.split,
                    n if n is not None else GENERATED_BY_DEFAULT,
                    seed,
                    **arguments,
                )
            if made:
                return family.function(
                    self.split, n if n is not None else GENERATED_BY_DEFAULT, seed, **arguments
                )
            # More of a split begin with the same ones.
            return family.function(self.split, None, seed, **arguments)[:n]
        except TypeError as error:
            raise UserError(f"{self}: {error}; is an option of the wrong type?") from error


def tasks_named(name: str, split: str, *, seed: int = 0) -> list[Task]:
    """Return the tasks that a run names: a family as in `TaskSpec.parse`, FILE.py or FILE.py:NAME.

    split: "train" or "validation", where the name says no other; a function in a file is given it
    if it has such an argument. Of a family that is generated, 1,024 tasks to train on and 200 held
    out; a function in a file is asked for 1,024 and 64, if it has an argument `n`. Raises
    UserError, TaskError.
    """
    if name.endswith(".py") or ".py:" in name:
        return load_tasks(
            name,
            _TRAINING_TASKS if split == "train" else _HELD_OUT_TASKS,
            split=split,
            whole_list=True,
        )
    spec = TaskSpec.parse(name)
    if "@" not in name and (split == "train" or spec.split == "train"):
        spec = dataclasses.replace(spec, split=split)
    family = FAMILIES[spec.family]
    loaded = spec.path is not None or family.data is not None
    if loaded or split != "train":
        count = None
    else:
        count = _TRAINING_TASKS
    return spec.tasks(count, seed)

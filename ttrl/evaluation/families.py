"""Parse names of tasks from a command line: `gsm8k`, `mmlu=data/mmlu`,
`reasoning_gym:chain_sum@train`. The families: `ttrl.registries.FAMILIES`.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.errors import TaskError, UserError, describe, raised_in
from ttrl.registries import FAMILIES
from ttrl.tasks.reference import load_tasks
from ttrl.tasks.task import Task, task_list

GENERATED_BY_DEFAULT = 200
"""Default number of tasks of generated families."""
_HELD_OUT_TASKS = 64
_TRAINING_TASKS = 1024
"""Tasks of generated families to train on."""
_SPEC = re.compile(r"([A-Za-z0-9_-]+)(?::([^@=\s]+))?(?:@([A-Za-z0-9_-]+))?(?:=(.+))?")
_GIVEN_ELSEWHERE = ("name", "server", "split", "n", "seed", "path")


@dataclass(frozen=True)
class TaskSpec:
    """A request for tasks: FAMILY[:NAME][@SPLIT][=PATH]. Raises UserError for an unknown family, or
    a name or path not allowed for it.
    """

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
            families = ", ".join(sorted(FAMILIES.names()))
            raise UserError(
                f"no tasks are called {text!r}; give FAMILY, FAMILY@SPLIT, FAMILY=PATH (a file, a "
                "folder, or a data set's name on the hub), or a file of your own, FILE.py; "
                f"families: {families}"
            )
        family = FAMILIES[name]
        if family.example and match[2] is None:
            raise UserError(
                f"{name} has many families; choose one, such as {name}:{family.example}"
            )
        if match[2] is not None and not family.example:
            raise UserError(f"{name} is a single family; leave :{match[2]} out")
        if match[4] is None and family.data == "":
            raise UserError(
                f"{name} needs data; write {name}=PATH with a file, a folder, or a data set's name "
                "on the hub"
            )
        spec = cls(name, match[3] or family.split, match[4], name=match[2] or "")
        if match[4] is not None and "path" not in inspect.signature(spec.function).parameters:
            raise UserError(f"{name} is generated and reads no data; leave ={match[4]} out")
        return spec

    @property
    def function(self) -> Callable[..., list[Task]]:
        """Import the family's function. Raises UserError."""
        function: Callable[..., list[Task]] = FAMILIES.load(
            self.family, FAMILIES[self.family].tasks
        )
        return function

    def with_option(self, name: str, value: Any) -> "TaskSpec":
        """Add an argument for the family's function. Raises UserError for an unknown one."""
        parameters = inspect.signature(self.function).parameters
        known = [one for one in parameters if one not in _GIVEN_ELSEWHERE]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if name in _GIVEN_ELSEWHERE or (name not in known and not takes_any):
            raise UserError(
                f"{self.family} has no option {name!r}; choose one of {', '.join(known)}"
            )
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
        """Return the tasks: of loaded families at most `n` (None: all), of generated ones exactly
        `n` (None: GENERATED_BY_DEFAULT).

        Raises TaskError, and UserError for options of the wrong type.
        """
        family = FAMILIES[self.family]
        path = self.path if self.path is not None else family.data
        arguments = {**family.options, **self.options}
        if path is not None:
            arguments["path"] = path
        count = n
        if path is not None and not family.draws:
            count = None  # a larger split begins with the same ones
        elif n is None:
            count = GENERATED_BY_DEFAULT
        named = (self.name,) if family.example else ()
        function = self.function
        try:
            inspect.signature(function).bind(*named, self.split, count, seed, **arguments)
        except TypeError as error:
            raise UserError(
                f"{self}: {FAMILIES[self.family].tasks} takes other arguments ({error}); it needs "
                "split, n, seed and the options by name"
            ) from error
        try:
            found = function(*named, self.split, count, seed, **arguments)
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and self.options:
                advice = "; check the types of its options"
            else:
                advice = ""
            raise TaskError(
                f"{self}: making its tasks failed: {describe(error)}{raised_in(error)}{advice}"
            ) from error
        listed = task_list(found, str(self))[:n]
        if not listed:
            raise TaskError(f"{self} has no tasks; choose another split, or give more data")
        return listed


def tasks_named(name: str, split: str, *, seed: int = 0) -> list[Task]:
    """Return a run's tasks: of a family as in `TaskSpec.parse`, of FILE.py or FILE.py:NAME.

    split: "train" or "validation", unless the name has its own; passed to a file's function with
        such an argument. A generated family gives 1,024 tasks to train on and 200 held out; a
        file's function is asked for 1,024 and 64, if it has an argument `n`. Raises UserError,
        TaskError.
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

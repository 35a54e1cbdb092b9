"""Find the changed grader of a replay by its name or in tasks, and find the files of its code.

`module:name` is looked up in the current folder first, then on Python's path;
`path/to/file.py:name` is the given file. Either file is run like a script.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from ttrl.errors import TaskError, UserError
from ttrl.loop.carried import task_key
from ttrl.loop.environment import git_commit
from ttrl.records import Sample
from ttrl.system.files import digest
from ttrl.tasks.reference import load_reference, tasks_of
from ttrl.tasks.rewards import only_evaluates
from ttrl.tasks.task import Task, WithSample

ReplayGrader = Callable[..., Any]
"""`grader(choice)`, as in training, or `grader(choice, sample)`: the sample has task id, messages,
old reward and metrics. A grader with its argument named `choices` grades a task's samples together,
like a group_grader.
"""


class Regrader:
    """Find the task, and so the grader, of every old rollout."""

    def __init__(
        self, grader: "ReplayGrader | str | None", tasks: "Iterable[Task] | str | None"
    ) -> None:
        """Take exactly one of the two. Raises UserError if it cannot be found, imported, called."""
        if (grader is None) == (tasks is None):
            raise UserError("give a grader, or tasks with graders, but not both")
        given: Any = grader if tasks is None else tasks
        self.kind = "grader" if tasks is None else "tasks"
        self.by_name = isinstance(given, str)
        self.reference = _shown(given)
        self._grader: ReplayGrader | None = None
        self._tasks: dict[str, Task] = {}
        found, module = (
            load_reference(given, f"--{self.kind}") if isinstance(given, str) else (given, None)
        )
        sources: list[Any] = [found]
        if tasks is None:
            self._grader, self._arguments = found, _arguments(found, self.reference)
        else:
            listed = tasks_of(found, f"--tasks {self.reference}")
            without = [
                task.id for task in listed if task.grader is None and task.group_grader is None
            ]
            if without:
                raise TaskError(
                    f"--tasks {self.reference}: {len(without)} of {len(listed)} have no grader, "
                    f"such as {without[0]!r}: their rollout returns the reward. To grade their "
                    "conversations again, set --grader, or Task(grader=…)"
                )
            # Of equal ones the first.
            self._tasks = {task_key(task.id, task.messages): task for task in reversed(listed)}
            sources += [
                grader
                for task in listed
                for grader in (task.grader, task.group_grader)
                if grader is not None
            ]
        self.only_evaluates = only_evaluates(*sources)
        """Reason against training a policy on its grades; "" if there is none."""
        if isinstance(given, str):
            self.name = given.rpartition(":")[2].split(".")[-1]
        else:
            self.name = getattr(found, "__name__", "grader")
        self._paths = _source_files(sources if module is None else [module, *sources])

    @property
    def described(self) -> Mapping[str, Any]:
        """Return the entry for replay.json: the reference, digests of the code's files, their git
        commit, the tasks.
        """
        described: dict[str, object] = {
            self.kind: self.reference,
            "files": {_relative(path): digest(path) for path in self._paths},
            "git_commit": git_commit(self._paths[0].parent) if self._paths else None,
        }
        if self._tasks:
            described["task_count"] = len(self._tasks)
            described["tasks_digest"] = hashlib.sha256(
                "\n".join(sorted(self._tasks)).encode()
            ).hexdigest()
        return described

    @property
    def identity(self) -> str:
        """Return a digest of the code's files, the name within them, and the tasks; each grader has
        its own.
        """
        described = self.described
        parts = [
            self.kind,
            self.name,
            sorted(described["files"].values()),
            described.get("tasks_digest"),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def task(self, sample: Sample) -> Task | None:
        """Return the task to grade `sample`; None if the tasks lack it."""
        if self._grader is None:
            return self._tasks.get(task_key(sample.task_id, sample.messages))
        grader = self._grader
        if self._arguments == "choices":
            return Task(messages=sample.messages, group_grader=grader, id=sample.task_id)
        if self._arguments == "choice, sample":
            # A copy: the grader must not change the rollouts used for the later comparison.
            grader = WithSample(grader, dataclasses.replace(sample, metrics=dict(sample.metrics)))
        return Task(messages=sample.messages, grader=grader, id=sample.task_id)

    def knows_id(self, task_id: str) -> bool:
        """Return whether a task has this id, with any messages."""
        return any(task.id == task_id for task in self._tasks.values())


def _shown(given: Any) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, list | tuple):
        return f"a list of {len(given)} tasks"
    module = getattr(given, "__module__", None)
    name = getattr(given, "__qualname__", type(given).__name__)
    if module:
        return f"{module}:{name}"
    return name


def _relative(path: Path) -> str:
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd()).as_posix()
    return str(path)


def _arguments(grader: Any, shown: str) -> Literal["choice", "choice, sample", "choices"]:
    """Return a grader's arguments. Raises UserError for anything but a grader."""
    if inspect.isclass(grader):
        raise UserError(f"grader {shown} is a class; give an instance, or a function")
    if not callable(grader):
        raise UserError(
            f"grader {shown} is of type {type(grader).__name__} and cannot be called; give a "
            "function of the choice"
        )
    try:
        signature = inspect.signature(grader)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return "choice"

    def accepts(count: int) -> bool:
        try:
            signature.bind(*range(count))
        except TypeError:
            return False
        return True

    names = list(signature.parameters)
    if not accepts(1) and not accepts(2):
        raise UserError(
            f"grader {shown} takes ({', '.join(names)}); a grader must take (choice) or (choice, "
            "sample)"
        )
    if names[:1] == ["choices"] and accepts(1):
        return "choices"
    if accepts(2) and (not accepts(1) or names[1:2] == ["sample"]):
        return "choice, sample"
    return "choice"


def _source_files(objects: Iterable[Any]) -> list[Path]:
    """Return the source files of these modules, functions or instances, each once, in order."""
    found: dict[Path, None] = {}
    seen: set[int] = set()
    for one in objects:
        code = one if inspect.ismodule(one) or inspect.isroutine(one) else type(one)
        if callable(code):
            code = inspect.unwrap(code)
        if id(code) in seen:
            continue
        seen.add(id(code))
        with contextlib.suppress(TypeError, OSError):  # built in, or typed into a terminal
            path = Path(inspect.getsourcefile(code) or "")
            if path.is_file():
                found.setdefault(path.absolute())
    return list(found)

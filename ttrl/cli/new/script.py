"""Write a script to start from: tasks, and a run of them (`ttrl new`, `ttrl tasks new`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from ttrl.errors import UserError
from ttrl.registries import FAMILIES, TaskFamily
from ttrl.system.files import write_text

OWN = "own"
"""The task of a person who writes it."""
_HERE = Path(__file__).parent
_SMALL: Mapping[str, Any] = {
    "tasks_per_iteration": 16,
    "samples_per_task": 8,
    "max_tokens": 64,
    "seq_len": 512,
    "training": {"lr": 1e-5},
}
"""For a machine without a GPU; a family's replies are longer than a sum."""
_SMALL_FAMILY: Mapping[str, Any] = {**_SMALL, "max_tokens": 256, "seq_len": 2048}
_LARGE: Mapping[str, Any] = {
    "tasks_per_iteration": 32,
    "samples_per_task": 8,
    "max_tokens": 1024,
    "seq_len": 4096,
    "training": {"lr": 1e-6},
}
LORA: Mapping[str, Any] = {"training": {"lr": 1e-5, "lora_rank": 32}}
"""What a model needs that does not fit as a whole."""


@dataclass(frozen=True)
class Script:
    """What a script trains: a model, its tasks and settings."""

    name: str
    """Of the file, without .py."""
    task: str = OWN
    """Or a family of `ttrl eval`, also FAMILY=PATH."""
    model: str = "smollm2-135m"
    iterations: int = 20
    held_out: int = 64
    goal: float | None = None
    """The held-out metric at which the run ends."""
    on_gpu: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings other than the usual ones."""

    def text(self) -> str:
        """Return the script. Raises UserError for a task that is none, or has no tasks to train
        on.
        """
        name, _, path = self.task.partition("=")
        parts = {"name": self.name, "data": "", "argument": "", "parameter": ""}
        if name == OWN:
            metric = "right"
            usual = _SMALL
            tasks = _template("own_task.txt").substitute(parts)
            what = "sums that are right"
        else:
            family = trained_family(name)
            metric = family.score
            usual = _SMALL_FAMILY
            what = f"{name}, {metric}"
            if family.data is not None:
                source = path or family.data
                if not source:
                    raise UserError(f"{name} needs data: write {name}=FILE, or {name}=FOLDER")
                parts["data"] = f"        data={_literal(source)},\n"
                parts["argument"] = ", path=arguments.data"
                parts["parameter"] = ", path=None"
            tasks = _family_text(name, family, parts)
        if self.on_gpu:
            usual = _LARGE
        settings = {**usual, **self.changes, "validation_metric": metric}
        if self.goal is not None:
            settings["stop_at"] = self.goal
        run = _template("run.txt").substitute(
            parts,
            iterations=self.iterations,
            model=_literal(self.model),
            settings="".join(
                f"        {key}={_literal(value)},\n" for key, value in settings.items()
            ),
            held_out=self.held_out,
            what=_literal(what),
        )
        return tasks + run

    def write(self, path: Path) -> Path:
        """Write the script. Raises UserError if the file exists."""
        return write_new(path, self.text())


def trained_family(name: str) -> TaskFamily:
    """Return a family by its name. Raises UserError for one that a script cannot train on as it
    is.
    """
    if name not in FAMILIES:
        raise UserError(
            f"there is no task {name!r}; write {OWN} for a task of your own, or a family: "
            f"{', '.join(_trained())}"
        )
    family = FAMILIES[name]
    if family.example:
        raise UserError(
            f"{name} stands for many environments, and the script has to name one; "
            "docs/how-to/environments.md shows how"
        )
    return family


def _trained() -> list[str]:
    return [name for name in FAMILIES.names() if not FAMILIES[name].example]


def _family_text(name: str, family: TaskFamily, parts: Mapping[str, str]) -> str:
    module, _, function = family.tasks.partition(":")
    path = ", path=path" if parts.get("parameter") else ""
    return _template("family_tasks.txt").substitute(
        parts,
        family=name,
        module=module,
        function=function,
        options=path + "".join(f", {key}={value!r}" for key, value in family.options.items()),
    )


def _literal(value: Any) -> str:
    """Return a text, a number or a dictionary of them as Python has it."""
    return json.dumps(value, ensure_ascii=False)


def _template(name: str) -> Template:
    return Template((_HERE / name).read_text(encoding="utf-8"))


def check_new(path: Path) -> None:
    """Raise UserError if the file exists, or Python cannot import its name."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(
            f"{path} is not a Python module name; use letters, digits and underscores, and end in "
            ".py"
        )
    if path.exists():
        raise UserError(f"{path} exists already; choose another name, or remove it first")


def write_new(path: Path, text: str) -> Path:
    """Write a file that does not exist yet. Raises UserError as `check_new` does."""
    check_new(path)
    write_text(path, text)
    return path

"""Load user references, FILE.py:NAME or module:NAME: task lists and graders."""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ttrl.errors import TaskError, UserError, describe, raised_in
from ttrl.tasks.task import Task, task_list


def load_reference(
    reference: str, option: str, defaults: Sequence[str] = ()
) -> tuple[Any, ModuleType]:
    """Load a reference; return the object and its module. defaults: names implied by a bare
    FILE.py; the first existing one counts."""
    alone = bool(defaults) and reference.endswith(".py")
    place, colon, name = (reference, ":", defaults[0]) if alone else reference.rpartition(":")
    if not colon or not place or not name:
        raise UserError(
            f"{option} {reference}: give module:name or path/to/file.py:name, such as "
            "graders:strict"
        )
    if place.endswith(".py"):
        module = _import_file(Path(place), reference, option)
    else:
        module = _import(place, reference, option)
    if alone:
        name = next((one for one in defaults if hasattr(module, one)), name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            there = [
                key
                for key, value in vars(module).items()
                if callable(value) and not key.startswith("_")
            ]
            near = difflib.get_close_matches(name, there, n=1)
            if near:
                known = f"did you mean {near[0]!r}?"
            else:
                known = f"it has: {', '.join(there[:12]) or 'no functions'}"
            raise UserError(f"{option} {reference}: {place} has no {name!r}; {known}")
        found = getattr(found, part)
    return found, module


def _import(name: str, reference: str, option: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _explained(reference, option, name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its imports does not
            raise UserError(
                f"{option} {reference}: no module {error.name!r} in {folder} or on Python's path; "
                "write module:name, or path/to/file.py:name"
            ) from None
    raise AssertionError


def _import_file(path: Path, reference: str, option: str) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise UserError(f"{option} {reference}: {path} is not a file")
    if str(path.parent) not in sys.path:
        # As for a script: it may import its neighbours.
        sys.path.insert(0, str(path.parent))
    loaded = sys.modules.get(path.stem)  # must not replace another module of the same name
    is_other = loaded is not None and getattr(loaded, "__file__", None) != str(path)
    taken = path.stem in sys.stdlib_module_names or not path.stem.isidentifier() or is_other
    if taken:
        name = f"replayed_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    else:
        name = path.stem
    with _explained(reference, option, path.name):
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    raise AssertionError


@contextlib.contextmanager
def _explained(reference: str, option: str, what: str) -> Iterator[None]:
    """Turn any exception of the user's code during import into a UserError with the last line of
    its traceback.
    """
    arguments = sys.argv
    sys.argv = [what]  # a script may read its arguments when imported: hide ours
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{option} {reference}: importing {what} failed: {describe(error)}{raised_in(error)}"
        ) from error
    finally:
        sys.argv = arguments


_DEFAULT_NAMES = ("get_tasks", "tasks")


def load_tasks(
    reference: str, n: int | None, *, split: str | None = None, whole_list: bool = False
) -> list[Task]:
    """Load the first `n` tasks (None: all) of FILE.py, FILE.py:NAME or MODULE:NAME; NAME
    (get_tasks, else tasks) is a list or a function.

    A function is called with n= and split= if it takes them. whole_list: take all tasks of a list.

    Raises UserError, TaskError.
    """
    if n is not None and n < 1:
        raise UserError(f"--n is {n}; ask for at least one task")
    found, module = load_reference(reference, "tasks try", _DEFAULT_NAMES)
    if reference.endswith(".py"):
        reference += ":" + next(
            name for name in _DEFAULT_NAMES if getattr(module, name, None) is found
        )
    tasks = tasks_of(found, reference, n, split)
    if whole_list and not callable(found):
        return tasks
    return tasks[:n]


def tasks_of(found: Any, name: str, n: int | None = None, split: str | None = None) -> list[Task]:
    """Return the tasks of a non-empty list, or of a function returning one: called with n= and
    split= if it takes them.

    Raises UserError.
    """
    if callable(found):
        try:
            wanted = {"n": n, "split": split}
            takes = inspect.signature(found).parameters
            found = found(
                **{
                    key: value
                    for key, value in wanted.items()
                    if value is not None and key in takes
                }
            )
        except UserError:
            raise
        except Exception as error:
            raise TaskError(
                f"{name}: calling it failed: {describe(error)}{raised_in(error)}"
            ) from error
    if isinstance(found, Iterator):
        found = itertools.islice(found, n)  # it may have no end
    listed = task_list(found, name)
    if not listed:
        raise TaskError(f"{name} is empty; give at least one task")
    return listed

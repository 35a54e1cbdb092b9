"""Pickle graders for another process: by name if their modules can be imported there, otherwise
whole.
"""

import contextlib
import functools
import importlib.machinery
import io
import sys
import types
from typing import Any

import cloudpickle

from ttrl.errors import GraderError
from ttrl.tasks.task import Grader


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles modules whole if they cannot be imported elsewhere: tests, handmade ones, those on no
    path.

    cloudpickle assumes all loaded modules can be imported there.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        name = (
            obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
        )
        if (
            isinstance(obj, type | types.FunctionType | types.ModuleType)
            and isinstance(name, str)
            and not is_importable(name)
        ):
            module = sys.modules[name]
            if name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                self.registered.append(module)
        return super().reducer_override(obj)


def pickled(grader: Grader, where: str) -> bytes:
    """Pickle a grader. Raises GraderError, naming it, on failure."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(grader)
    # From `__reduce__` and `__getstate__` of any object in the grader.
    except Exception as error:
        name = getattr(grader, "__qualname__", None) or type(grader).__qualname__
        raise GraderError(
            f"{where}: the grader {name} cannot be sent to a process of its own: "
            f"{type(error).__name__}: {error}. Create its locks, clients and open files inside the "
            "call, or set isolated=False"
        ) from error
    finally:
        for module in pickler.registered:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


@functools.cache
def is_importable(name: str) -> bool:
    """Return whether `import name` in another process with our sys.path finds the same module."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True  # cloudpickle handles it
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    parts = name.split(".")
    path = None
    spec = None
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), path)
        if spec is None:
            # C extensions and some packages make submodules by hand; importing the package creates
            # them.
            return end > 1 and getattr(module, "__file__", None) is None
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    return file is None or spec is None or spec.origin is None or spec.origin == file


def _find(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """Find a module as the import system does, but without loading packages or checking loaded
    modules.
    """
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a finder of somebody else's
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None

"""The names of loggers in configs, and what can be wrong with such an entry. Loads none of their
packages.
"""

import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

from ttrl.configs.base import without_secrets

NEEDS: dict[str, str | None] = {"stdout": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""Our own loggers, and the package that each needs besides ttrl's requirements."""
TORCHTUNE = "torchtune.training.metric_logging."
_TORCHTUNE_NEEDS: dict[str, str | None] = {
    "StdoutLogger": None, "DiskLogger": None, "TensorBoardLogger": "tensorboard",
    "WandBLogger": "wandb", "CometLogger": "comet_ml",
}  # fmt: skip
_ARGUMENTS: dict[str, set[str]] = {"stdout": set(), "tensorboard": {"log_dir"}}
"""Which arguments an entry may have; "wandb" passes everything on to wandb.init."""


def normalised(entry: Any) -> tuple[str, dict[str, Any]]:
    """Return an entry of `loggers` as (name or dotted name, arguments). Raises ValueError that says
    what is wrong with it.
    """
    if isinstance(entry, str):
        name = entry
        arguments = {}
    elif isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry):
        arguments = dict(entry)
        names = [arguments.pop(key) for key in ("name", "_component_") if key in entry]
        # An argument of the component, such as W&B's name of the run.
        if "_component_" in entry and "name" in entry:
            arguments["name"], names = entry["name"], [entry["_component_"]]
        if len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(
                f"loggers: {without_secrets(entry)!r} names no logger; give it a name, or a "
                "_component_"
            )
        name = names[0]
    else:
        raise ValueError(f"loggers: {entry!r} is neither a name nor a mapping with a name")
    if name in NEEDS:
        if name in _ARGUMENTS:
            unknown = sorted(arguments.keys() - _ARGUMENTS[name])
        else:
            unknown = []
        if unknown:
            allowed = ", ".join(sorted(_ARGUMENTS[name])) or "none"
            raise ValueError(
                f"loggers: {name} has no argument {unknown[0]!r}; there are: {allowed}"
            )
    elif name.startswith(TORCHTUNE):
        if name.removeprefix(TORCHTUNE) not in _TORCHTUNE_NEEDS:
            raise ValueError(
                f"loggers: torchtune has no {name!r}; there are: {', '.join(_TORCHTUNE_NEEDS)}"
            )
    elif "." not in name:
        near = difflib.get_close_matches(name, NEEDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"loggers: there is no {name!r}{hint}; there are {', '.join(NEEDS)}, and dotted "
            "names of classes"
        )
    return name, arguments


def logger_problems(entry: Any) -> list[str]:
    """Return what is wrong with an entry, one line each: no such logger, or its package is
    missing.
    """
    try:
        name, _ = normalised(entry)
    except ValueError as error:
        return [str(error)]
    package = NEEDS.get(name) or _TORCHTUNE_NEEDS.get(name.removeprefix(TORCHTUNE))
    if package is not None and importlib.util.find_spec(package) is None:
        way_out = f"pip install {package}, or 'ttrl[loggers]' for all of them"
        return [f"loggers: {name} needs the package {package}, which is not installed: {way_out}"]
    return []

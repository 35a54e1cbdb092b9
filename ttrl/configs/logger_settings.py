"""Name the loggers for configs, and check such entries. Loads none of their packages."""

import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

from ttrl.configs.base import Settings, without_secrets
from ttrl.registries import LOGGERS

TORCHTUNE = "torchtune.training.metric_logging."
_TORCHTUNE_NEEDS: dict[str, str | None] = {
    "StdoutLogger": None, "DiskLogger": None, "TensorBoardLogger": "tensorboard",
    "WandBLogger": "wandb", "CometLogger": "comet_ml",
}  # fmt: skip

_IN_NO_EXTRA = ("comet_ml", "swanlab")
"""What `ttrl[loggers]` leaves out: swanlab would replace tested versions of others."""


def normalised(entry: Any) -> tuple[str, Settings]:
    """Return an entry of `loggers` as (name or dotted name, arguments). Raises ValueError with the
    mistake.
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
    if name in LOGGERS:
        allowed = LOGGERS[name].arguments
        unknown = [] if allowed is None else sorted(arguments.keys() - set(allowed))
        if unknown:
            raise ValueError(
                f"loggers: {name} has no argument {unknown[0]!r}; choose from "
                f"{', '.join(allowed or ()) or 'none'}"
            )
    elif name.startswith(TORCHTUNE):
        if name.removeprefix(TORCHTUNE) not in _TORCHTUNE_NEEDS:
            raise ValueError(
                f"loggers: torchtune has no {name!r}; choose from {', '.join(_TORCHTUNE_NEEDS)}"
            )
    elif "." not in name:
        known = LOGGERS.names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"loggers: there is no {name!r}{hint}; choose from {', '.join(known)}, and dotted "
            "names of classes"
        )
    return name, arguments


def logger_problems(entry: Any) -> list[str]:
    """Return the mistakes in an entry, one line each: no such logger, or its package is missing."""
    try:
        name, _ = normalised(entry)
    except ValueError as error:
        return [str(error)]
    if name in LOGGERS:
        package = LOGGERS[name].needs
    else:
        package = _TORCHTUNE_NEEDS.get(name.removeprefix(TORCHTUNE))
    if package is not None and importlib.util.find_spec(package) is None:
        way_out = f"pip install {package}"
        if package not in _IN_NO_EXTRA:
            way_out += ", or 'ttrl[loggers]' for all of them"
        return [f"loggers: {name} needs the package {package}: {way_out}"]
    return []

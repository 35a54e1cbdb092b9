"""Describe what users and their scripts depend on, as text that can be compared: the golden files
of this folder.

python tests/surface/describe.py    writes them again
"""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ttrl
from ttrl import errors
from ttrl.cli.commands import make_parser
from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.configs.run import TrainConfig
from ttrl.evaluation.evaluate import EvalConfig

FOLDER = Path(__file__).parent


def signature(function: Any) -> str:
    """Return a signature without addresses and without the homes of classes."""
    text = re.sub(
        r"<(function|object object).*? at 0x\w+>", r"\1", str(inspect.signature(function))
    )
    return without_homes(text)


def without_homes(text: str) -> str:
    """Return the text of a type with the names of classes alone: they may move."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", re.sub(r"<class '([\w.]+)'>", r"\1", text))


def names() -> Iterator[str]:
    """Public names, with the signatures of functions and of public methods."""
    for name in sorted(set(ttrl.__all__) - {"__version__"}):
        value = getattr(ttrl, name)
        if not inspect.isclass(value):
            yield f"{name}{signature(value)}"
            continue
        # The settings of configs: settings.txt.
        yield f"class {name}" if hasattr(value, "parse") else f"class {name}{signature(value)}"
        for key, member in sorted(vars(value).items()):
            if key.startswith("_"):
                continue
            if isinstance(member, property):
                yield f"    {name}.{key}"
            elif callable(member) or isinstance(member, classmethod | staticmethod):
                yield f"    {name}.{key}{signature(getattr(value, key))}"


def settings() -> Iterator[str]:
    """Every setting with its type and default."""
    for config in (TrainConfig, GRPOConfig, SFTConfig, EvalConfig):
        yield f"class {config.__name__}"
        for field in dataclasses.fields(config):
            yield f"    {field.name}: {without_homes(str(field.type))}{default_of(field)}"


def default_of(field: "dataclasses.Field[Any]") -> str:
    """Return " = DEFAULT", or "" for a setting without one."""
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {field.default_factory()!r}"
    return ""


def commands(parser: argparse.ArgumentParser | None = None) -> Iterator[str]:
    """Every command with its arguments and options."""
    parser = make_parser() if parser is None else parser
    yield parser.prog
    inner: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner += action.choices.values()
        elif not isinstance(action, argparse._HelpAction):
            yield f"    {option(action)}"
    for one in inner:
        yield from commands(one)


def option(action: argparse.Action) -> str:
    """Return an argument or option with what it takes."""
    parts = [" ".join(action.option_strings) or action.dest]
    if action.nargs != 0:
        parts.append(f"takes {action.nargs or 'one'}")
    if action.choices is not None:
        parts.append("of " + ", ".join(map(str, action.choices)))
    if action.required and action.option_strings:
        parts.append("required")
    if action.nargs != 0 and action.default not in (None, argparse.SUPPRESS):
        parts.append(f"default {action.default!r}")
    return "; ".join(parts)


def error_tree() -> Iterator[str]:
    """Every class of errors with its bases."""
    for name, value in sorted(vars(errors).items()):
        if inspect.isclass(value) and issubclass(value, errors.TtrlError):
            yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"


FILES: dict[str, Callable[[], Iterator[str]]] = {
    "names.txt": names,
    "settings.txt": settings,
    "commands.txt": commands,
    "errors.txt": error_tree,
}


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of JSON with the types of what they hold; numbers and names as keys stand for
    all of their kind.
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            own = "*" if key.lstrip("-").isdigit() else key
            yield from keys_of(inner, f"{path}.{own}" if path else own)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from keys_of(inner, f"{path}[]")
    else:
        kind = (
            "number"
            if isinstance(value, int | float) and not isinstance(value, bool)
            else type(value).__name__
        )
        yield f"{path}: {kind}"


if __name__ == "__main__":
    for file, lines in FILES.items():
        (FOLDER / file).write_text("\n".join(lines()) + "\n", encoding="utf-8")

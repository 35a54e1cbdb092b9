"""Explain every setting: read the docstring after each field in the source of its class.

For help(), `ttrl config` and docs/reference/settings.md. A comment line between two
fields is the heading of those below it.
"""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100


@dataclass(frozen=True)
class Setting:
    """One setting of a class."""

    name: str
    kind: str
    """Its type, with its possible values if these are listed."""
    default: str
    """As Python writes it; "" if there is none."""
    meaning: str
    """"" if it has none."""
    heading: str
    """Its heading; "" above the first heading."""

    def text(self) -> str:
        """Return it as help() shows it."""
        meaning = textwrap.fill(
            self.meaning,
            WIDTH,
            initial_indent="    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        return f"{self.name}: {self.kind}{f' = {self.default}' if self.default else ''}\n{meaning}"


UNIONS = (types.UnionType, typing.Union)
"""The type of `a | b`; and of `Literal[…] | None`, a different one before Python 3.14."""


@functools.cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return the settings of a dataclass, those of its own class first, in the order of the
    source.
    """
    written: dict[str, tuple[str, str]] = {}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            for name, words in _written(base).items():
                written.setdefault(name, words)
    fields: dict[str, dataclasses.Field[Any]] = {
        field.name: field for field in dataclasses.fields(cls)
    }
    kinds = typing.get_type_hints(cls)
    return tuple(
        Setting(name, _kind(kinds[name]), _default(fields[name]), *words)
        for name, words in written.items()
        if name in fields
    )


def _kind(hint: Any) -> str:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(_literal, arguments))
    if origin in UNIONS:
        return " | ".join(map(_kind, arguments))
    if arguments:
        return f"{origin.__name__}[{', '.join(map(_kind, arguments))}]"
    return {type(None): "None"}.get(hint, getattr(hint, "__name__", str(hint)))


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def _written(cls: type) -> dict[str, tuple[str, str]]:
    """Return (meaning, heading) of each field in the source of a class; {} without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    [node] = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    lines = source.splitlines()
    heading = ""
    end = node.body[0].lineno
    found = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        above = [line.strip() for line in lines[end : statement.lineno - 1]]
        comments = [line.removeprefix("# ") for line in above if line.startswith("# ")]
        if comments:
            heading = " ".join(comments)
        end = statement.end_lineno or end
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            meaning = ""
            match following:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    meaning = " ".join(words.split())
            found[statement.target.id] = meaning, heading
    return found


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.metadata.get("required"):
        return ""
    if field.default_factory is not dataclasses.MISSING:
        return _literal(field.default_factory())
    if field.default is dataclasses.MISSING:
        return ""
    return _literal(field.default)


_T = typing.TypeVar("_T", bound=type)


def explained(cls: _T) -> _T:
    """Let help() explain every setting of a dataclass."""
    type.__setattr__(cls, "__doc__", Reference(cls, cls.__doc__ or ""))
    return cls


class Reference:
    """A class's `__doc__`, with every setting explained; made on first use."""

    def __init__(self, cls: type, about: str) -> None:
        self._cls = cls
        self._about = about

    def __get__(self, instance: object, owner: type) -> str:
        lines = [inspect.cleandoc(self._about)]
        heading = ""
        for setting in settings_of(self._cls):
            if setting.heading not in ("", heading):
                heading = setting.heading
                lines.append(f"{heading}\n{'-' * min(len(heading), WIDTH)}")
            lines.append(setting.text())
        return "\n\n".join(lines)


def as_markdown(about: str, classes: Sequence[tuple[str, type]]) -> str:
    """Return a page with an entry for each setting of each class, under the given titles."""
    lines = [about]
    for title, cls in classes:
        heading = ""
        lines.append(f"## {title}")
        for setting in settings_of(cls):
            if setting.heading not in ("", heading):
                heading = setting.heading
                lines.append(textwrap.fill(f"**{heading}**", WIDTH))
            entry = f"- `{setting.name}`: `{setting.kind}`"
            if setting.default:
                entry += f" = `{setting.default}`"
            # A page would hide it as a tag.
            meaning = re.sub(r"<(?=/?[A-Za-z])", "&lt;", setting.meaning)
            entry = f"{entry}. {meaning}"
            lines.append(
                textwrap.fill(
                    entry,
                    WIDTH,
                    subsequent_indent="  ",
                    break_on_hyphens=False,
                    break_long_words=False,
                )
            )
    return "\n\n".join(lines) + "\n"

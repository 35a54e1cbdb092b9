"""Define strict dataclasses: they report all their mistakes at once, and hide their secrets when
shown.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from ttrl.configs.settings_reference import UNIONS, explained
from ttrl.errors import ConfigError, UserError
from ttrl.system.console import errors_in_lines

_C = typing.TypeVar("_C", bound="Config")


def required() -> Any:
    """Return a field required in a file of settings; in Python code its default is ""."""
    return dataclasses.field(default="", metadata={"required": True})


@typing.dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, required))
def settings(cls: type[_C]) -> type[_C]:
    """Make a dataclass of settings: its constructor names all mistakes at once, and help() explains
    every setting.
    """
    made = dataclasses.dataclass(kw_only=True)(cls)
    plain: Callable[..., None] = made.__init__

    @functools.wraps(plain)
    def init(self: _C, *unnamed: Any, **given: Any) -> None:
        own = {field.name: field for field in dataclasses.fields(made)}
        unknown = {
            name: value
            for name, value in given.items()
            if name not in own and not (name in made.gone and value is None)
        }
        alone = [
            f"{value!r} has no name; write settings by name, such as {next(iter(own))}=…"
            for value in unnamed
        ]
        if (
            alone
            or (unknown and not made._is_part)
            or any(_has_no_default(own[name]) for name in own.keys() - given.keys())
        ):
            config, found = made.examine(given)
            errors_in_lines(UserError)
            raise ConfigError(
                made.__name__, alone + found + config.local_problems() + config.absent()
            )
        vars(self).update(_given=tuple(given), _unknown=unknown)
        plain(self, **{name: value for name, value in given.items() if name in own})

    type.__setattr__(made, "__init__", init)
    return explained(made)


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _describe(kind: Any) -> str:
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if origin in UNIONS:
        return " or ".join(map(_describe, parts))
    if origin in (dict, Mapping):
        return "a mapping with names as keys"
    if origin in (list, tuple, Sequence):
        return "a list with each item " + _describe(parts[0])
    if origin is os.PathLike:
        return "a path"
    known = {
        type(None): "null",
        str: "a string",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
    }
    return known.get(kind, f"a {kind.__name__}" if isinstance(kind, type) else str(kind))


def _converted(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, or raise TypeError. Ints pass as floats, and so do strings such as
    1e-4 (text in YAML 1.1); nothing else is converted."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is Literal:
        if value in parts and not isinstance(value, bool):
            return value
    elif origin in UNIONS:
        for part in parts:
            try:
                return _converted(value, part)
            except TypeError:
                continue
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
    elif origin in (list, tuple, Sequence):
        if isinstance(value, list | tuple):
            made = tuple if origin is tuple else list
            return made(_converted(entry, parts[0]) for entry in value)
    elif origin is os.PathLike:
        if isinstance(value, os.PathLike):
            return value
    elif kind is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise TypeError from None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif kind is str and isinstance(value, Path):
        return str(value)
    elif kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    raise TypeError


def absent_folder(model: str) -> list[str]:
    """Return a line about a model if it can only be a folder and does not exist."""
    is_folder = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_folder and not os.path.exists(model):
        return [f"model folder {model} does not exist"]
    return []


@functools.cache
def _kinds(cls: type) -> Mapping[str, Any]:
    """Return the types of a config's fields. A run asks for them dozens of times in an iteration,
    milliseconds each time.
    """
    return typing.get_type_hints(cls)


Settings: typing.TypeAlias = Mapping[str, Any]
"""Settings by name, as a config file holds them."""

# Stand-ins for wrong required values, to check the others.
_STAND_INS: dict[Any, Any] = {str: "", int: 1, float: 1.0}


@dataclasses.dataclass(kw_only=True)
class Config:
    """Base of the config dataclasses. Subclasses list what else can be wrong in `problems`."""

    _given: typing.ClassVar[tuple[str, ...]] = ()
    _unknown: typing.ClassVar[Settings] = {}
    _is_part: typing.ClassVar[bool] = False
    """Whether its constructor leaves misspelt names to the config that it is a part of, which names
    all mistakes at once.
    """

    gone: typing.ClassVar[Mapping[str, str]] = {}
    """Settings of earlier versions, which null in a file of theirs does no harm, with what takes
    their place.
    """

    def problems(self) -> list[str]:
        """Return the mistakes in the values beyond their types, one line each."""
        return []

    def local_problems(self) -> list[str]:
        """Return the mistakes for the packages installed here, one line each."""
        return []

    def absent(self) -> list[str]:
        """Return things named by the values but missing on this machine, one line each, as far as
        its files tell. Called after other mistakes too: later users of the values say more.
        """
        return []

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of the settings."""
        return {field.name for field in dataclasses.fields(cls)}

    @classmethod
    def elsewhere(cls, name: str) -> str | None:
        """Return advice for a setting of something else, or of another library; None if there is
        none.
        """
        return None

    @classmethod
    def parse(cls, values: Settings, where: str) -> Self:
        """Make a config from plain values. Raises ConfigError with every problem: unknown and
        missing keys, types, ranges.
        """
        config, found = cls.examine(values)
        if found:
            raise ConfigError(where, found + config.absent())
        return config

    @classmethod
    def examine(cls, values: Settings) -> tuple[Self, list[str]]:
        """Return a config with defaults for wrong values, and every problem, one line each."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        itself: Any = cls  # mypy takes it for one of its configs, and those have no hash
        kinds = _kinds(itself)
        found: list[str] = []
        meant = set()
        for key in values:
            if key in cls.gone:
                found += [] if values[key] is None else [f"{key} is gone: {cls.gone[key]}"]
            elif key not in fields:
                near = cls.elsewhere(str(key)) or next(
                    iter(difflib.get_close_matches(str(key), fields, n=1)), None
                )
                meant.add(near)
                if len(fields) <= 20:
                    listed = f"known keys: {', '.join(fields)}"
                else:
                    listed = "`ttrl config` lists all"
                hint = (
                    listed
                    if near is None
                    else f"did you mean {near!r}?"
                    if near in fields
                    else f"write {near}"
                )
                found.append(f"unknown key {key!r}; {hint}")
        converted: dict[str, Any] = {}
        for name, field in fields.items():
            required = _has_no_default(field) or bool(field.metadata.get("required"))
            if name in values:
                try:
                    converted[name] = _converted(values[name], kinds[name])
                    continue
                except TypeError:
                    found.append(f"{name} is {values[name]!r}; it must be {_describe(kinds[name])}")
            elif required and name not in meant:  # otherwise it is there, misspelt
                found.append(f"{name} is missing; it must be {_describe(kinds[name])}")
            if required:
                converted[name] = _STAND_INS.get(kinds[name], "")
        config = cls(**converted)
        return config, found + config.problems()

    def check(self, where: str) -> Self:
        """Check a config made in Python like `parse`. Raises ConfigError."""
        return self.parse(self._values(), where)

    def examined(self) -> tuple[Self, list[str]]:
        """Examine a config made in Python, like `examine` its plain values."""
        return self.examine(self._values())

    def _values(self) -> Settings:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, **self._unknown}

    def at_least(self, minimum: float, *names: str) -> list[str]:
        """Return a problem for each value below `minimum`; None passes, here and in the next
        two.
        """
        return self._unless(lambda value: value >= minimum, f"at least {minimum}", names)

    def above_zero(self, *names: str) -> list[str]:
        """Return a problem for each value of 0 or less."""
        return self._unless(lambda value: value > 0, "above 0", names)

    def within(self, interval: Literal["[0, 1]", "[0, 1)"], *names: str) -> list[str]:
        """Return a problem for each value outside of an interval."""
        return self._unless(
            lambda value: 0 <= value < 1 or (value == 1 and interval == "[0, 1]"),
            f"in {interval}",
            names,
        )

    def _unless(
        self, right: Callable[[float], bool], wanted: str, names: Iterable[str]
    ) -> list[str]:
        given = {name: getattr(self, name) for name in names}
        return [
            f"{n} is {value}; it must be {wanted}"
            for n, value in given.items()
            if value is not None and not right(value)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for YAML."""
        return dataclasses.asdict(self)

    def given(self) -> dict[str, Any]:
        """Return the constructor's plain values, misspelt ones too, and those different from the
        defaults; for a copy, only the latter."""
        own = {field.name: field for field in dataclasses.fields(self)}
        named: tuple[str, ...] = ()
        if len(self._given) < len(own):
            named = self._given
        plain = {
            name: field.default_factory() if callable(field.default_factory) else field.default
            for name, field in own.items()
        }
        given = {
            name: value
            for name, value in self.to_dict().items()
            if name in named or value != plain[name]
        }
        return given | dict(self._unknown)


HIDDEN = "***"
_SECRET = re.compile(
    r"(?i)(^|[-_.])(api-?key|key|token|secret|password|passwd|authorization|credentials?|cookie|"
    r"headers?|pat)$"
)
"""Matches the names of secret settings: "hf_token", "X-Api-Key"; not "max_tokens", "key_file"."""


def without_secrets(values: Any, name: str = "") -> Any:
    """Return plain values, with HIDDEN for each string with a secret's name."""
    if isinstance(values, Mapping):  # for a secret as a whole, such as headers, every part
        return {
            key: without_secrets(value, name if _SECRET.search(name) else str(key))
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [without_secrets(value, name) for value in values]
    if isinstance(values, str) and values and _SECRET.search(name):
        return HIDDEN
    return values

"""The exception tree: the drawing in the docstring is the specification."""

import inspect
import re

import pytest

import ttrl.errors as errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value)
    and issubclass(value, BaseException)
    and value.__module__ == errors.__name__
}


def drawn_parents() -> dict[str, str | None]:
    """Class name → its parent's name, read from the tree of the docstring by indentation."""
    parents: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─\s]*)([A-Z]\w+Error)\b", line)
        if not match:
            continue
        depth, name = len(match[1]), match[2]
        while path and path[-1][0] >= depth:
            path.pop()
        parents[name] = path[-1][1] if path else None
        path.append((depth, name))
    return parents


def test_the_drawing_names_every_exception_and_no_other() -> None:
    assert set(drawn_parents()) == set(CLASSES)


def test_every_exception_stands_where_it_is_drawn() -> None:
    for name, parent in drawn_parents().items():
        expected = Exception if parent is None else CLASSES[parent]
        assert CLASSES[name].__bases__[0] is expected, f"{name} is drawn below {parent}"


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.UserError, ValueError),
        (errors.ServerError, RuntimeError),
        (errors.TrainerError, RuntimeError),
        (errors.StorageError, OSError),
    ],
)
def test_code_that_knows_only_builtins_can_catch_ours(
    ours: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(ours, builtin)
    assert issubclass(ours, errors.TtrlError)


def test_a_config_error_says_everything_at_once() -> None:
    error = errors.ConfigError(
        "config.yaml", ["lr is -1; give a positive number", "modle is unknown; did you mean model?"]
    )
    assert error.problems == [
        "lr is -1; give a positive number",
        "modle is unknown; did you mean model?",
    ]
    assert str(error).splitlines() == [
        "config.yaml: 2 problems",
        "  - lr is -1; give a positive number",
        "  - modle is unknown; did you mean model?",
    ]
    assert str(errors.ConfigError("x", ["y"])).startswith("x: 1 problem\n")


def test_no_message_acts_on_a_terminal() -> None:
    """Whatever it quotes: of a server, a log, a template."""
    for kind in CLASSES.values():
        words = ("f", ["\x1b[2J\x9bm"]) if kind is errors.ConfigError else ("\x1b[2J\x9bm",)
        more = {errors.RequestError: ("status",), errors.RolloutLimitError: ("turns",)}.get(
            kind, ()
        )
        assert str(kind(*words, *more)).splitlines()[-1].endswith("\\x1b[2J\\x9bm"), kind
    assert errors.describe(RuntimeError("\x1b[2J")) == "RuntimeError: \\x1b[2J"

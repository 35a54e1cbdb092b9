"""Zebra puzzles, read from their text and modelled for CP-SAT: part of check_puzzles.py."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Streets(NamedTuple):
    """A zebra puzzle, read: (kind, phrase, phrase or house) clues; phrases hold one value each."""

    houses: int
    columns: list[list[str]]
    clues: list[str]


def read_streets(puzzle: str) -> Streets:
    """Takes a zebra puzzle apart."""
    columns = [
        re.findall(r"`([^`]+)`", line) for line in puzzle.splitlines() if line.startswith(" - ")
    ]
    return Streets(len(columns[0]), columns, re.findall(r"^\d+\. (.+)\.$", puzzle, re.M))


def streets_model(
    cp: Any, streets: Streets, clues: Sequence[str], rows: Sequence[Sequence[str]]
) -> Any:
    """A CP-SAT model with solutions other than `rows` only."""
    model = cp.CpModel()
    at = {
        value: model.new_int_var(1, streets.houses, "")
        for column in streets.columns
        for value in column
    }
    for column in streets.columns:
        model.add_all_different([at[value] for value in column])

    def who(phrase: str) -> Any:
        named = [value for value in at if re.search(rf"\b{value}\b", phrase, re.I)]
        assert len(named) == 1, f"{phrase!r} names {named}"
        return at[named[0]]

    ordinals = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6}
    forms: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
        (r"(.+) is in the (\w+) house", lambda x, y: x == y),
        (r"(.+) is not in the (\w+) house", lambda x, y: x != y),
        (r"(.+) is somewhere to the left of (.+)", lambda x, y: x < y),
        (r"(.+) is somewhere to the right of (.+)", lambda x, y: x > y),
        (r"(.+) is directly left of (.+)", lambda x, y: x + 1 == y),
        (r"(.+) is directly right of (.+)", lambda x, y: x - 1 == y),
    )
    for clue in clues:
        apart = re.fullmatch(r"There (?:is one house|are two houses) between (.+) and (.+)", clue)
        beside = re.fullmatch(r"(.+) and (.+) are next to each other", clue)
        if match := apart or beside:
            distance = 1 if beside else (2 if "one house" in clue else 3)
            gap = model.new_int_var(0, streets.houses, "")
            model.add_abs_equality(gap, who(match[1]) - who(match[2]))
            model.add(gap == distance)
            continue
        for form, relation in forms:
            if match := re.fullmatch(form, clue):
                model.add(
                    relation(
                        who(match[1]), ordinals[match[2]] if match[2] in ordinals else who(match[2])
                    )
                )
                break
        else:
            match = re.fullmatch(r"(.+) is (the person .+)", clue)
            assert match is not None, clue
            model.add(who(match[1]) == who(match[2]))
    others = []
    for house, row in enumerate(rows, 1):
        for value in row[1:]:
            others.append(moved := model.new_bool_var(""))
            model.add(at[value] != house).only_enforce_if(moved)
    model.add_bool_or(others)
    return model

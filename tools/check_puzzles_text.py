"""Temporal-clue puzzles, read from their prompts as a person would read them: part of
check_puzzles.py.
"""

import re
from typing import Any, NamedTuple

DIRECTIONS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}


class Mystery(NamedTuple):
    """A temporal-clue prompt, read. Statements are tuples (kind, ...), see `read_statement`; names
    are as in the text.
    """

    victim: str
    suspects: list[str]
    weapons: list[str]
    rooms: list[str]
    width: int
    times: list[str]
    motives: dict[str, int]
    """By name: how many suspects have it."""
    clues: list[tuple[Any, ...]]
    questions: dict[str, str]


def read_mystery(prompt: str) -> Mystery:
    """Takes a prompt apart. Raises ValueError for a clue that it does not know."""
    victim = "Mr. Boddy" if " invited" not in prompt else prompt.split(" invited", 1)[0]
    lists = [re.findall(r"^• (.+)$", part, re.M) for part in re.split(r"\n\n(?!•)", prompt)]
    lists = [items for items in lists if items]
    suspects = lists[0]
    weapons = lists[1]
    rest = lists[2:]
    times = rest.pop(0) if rest and re.fullmatch(r"\d\d:\d\d [AP]M", rest[0][0]) else [""]
    motives = {}
    for text in rest[0] if rest else []:
        counted = re.fullmatch(r"(.+) \((\d+) suspects?\)", text)
        motives[counted[1] if counted else text] = int(counted[2]) if counted else 1
    rooms = re.findall(r"^\d+\. (.+)$", prompt, re.M)
    first_row = re.search(r"^W (\S+) E$", prompt, re.M)
    assert first_row is not None
    mystery = Mystery(
        victim, suspects, weapons, rooms, first_row[1].count("|") + 1, times, motives, [], {}
    )
    for text in re.findall(r"^- (.+?)\.?$", prompt, re.M):
        mystery.clues.append(read_statement(mystery, text))
    for letter, text in re.findall(r"^([A-Z])\. (.+\?)$", prompt, re.M):
        mystery.questions[letter] = text
    return mystery


def read_statement(mystery: Mystery, text: str) -> tuple[Any, ...]:
    """A clue as a tuple: ("in", who, room, time), ("or", statement, statement), ..."""
    for word, kind in ((" if and only if ", "iff"), (" or ", "or")):
        if word in text:
            return (kind, *(read_statement(mystery, part) for part in text.split(word)))
    if known := re.fullmatch(r".+ was murdered by (?:the|a) suspect motivated by (\w+)", text):
        return ("motive", ("murderer", 0), known[1])
    if known := re.fullmatch(r".+ was murdered by (.+)", text):
        return ("by", mystery.suspects.index(known[1]))
    at = r"(?: at (?P<time>\d\d:\d\d [AP]M))?"
    forms = (
        ("killed", r".+ was killed with the (?P<thing>.+)"),
        ("murdered", r".+ was murdered" + at),
        ("motive", r"(?P<who>.+) (?:is|was) motivated by (?P<motive>\w+)"),
        ("same", r"(?P<who>.+) was in the same room as (?P<other>.+?)" + at),
        ("beside", r"(?P<who>.+) was in the room just (?P<direction>\w+) of (?P<other>.+?)" + at),
        ("never", r"(?P<who>.+) was (?:never|not) in the (?P<room>.+)"),
        ("stayed", r"(?P<who>.+) was in the (?P<room>.+) from (?P<time>.+) to (?P<until>.+)"),
        (
            "together",
            r"(?P<who>.+) and (?P<other>.+) were (?:in|at) the (?P<room>.+) together at least "
            r"once",
        ),
        (
            "moved",
            r"(?P<who>.+) moved(?P<thing> .+)? from the (?P<room>.+) to the (?P<second>.+?)" + at,
        ),
        ("in", r"(?P<who>.+) was (?:in|at) the (?P<room>.+?)" + at),
    )
    for kind, form in forms:
        if match := re.fullmatch(form, text):
            found: dict[str, Any] = match.groupdict()
            parts: list[Any] = [kind]
            for name, value in found.items():
                parts.append(_read_part(mystery, name, value))
            return tuple(parts)
    raise ValueError(f"no such kind of clue: {text!r}")


def _read_part(mystery: Mystery, name: str, value: str | None) -> Any:
    if name in ("room", "second"):
        return mystery.rooms.index(str(value))
    if name in ("time", "until"):
        return mystery.times.index(value or "")
    if name in ("who", "other", "thing"):
        return None if value is None else read_subject(mystery, value)
    return value


def read_subject(mystery: Mystery, text: str) -> tuple[str, Any]:
    """("mover", index of suspects, victim, weapons), ("murderer", 0), ("murder weapon", 0) or
    ("motive", name).
    """
    name = re.sub(r"^(?:the|a) ", "", text.strip(), flags=re.I)
    if name in ("murderer", "murder weapon"):
        return name, 0
    if match := re.fullmatch(r"suspect motivated by (\w+)", name):
        return "motive", match[1]
    return "mover", [*mystery.suspects, mystery.victim, *mystery.weapons].index(name)

"""NYT Connections: sixteen words, four hidden groups of four.

The puzzles belong to the New York Times, so ttrl ships none; the loader reads the commonly shared
files.
"""

import ast
import hashlib
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.answers import after_thinking, place_in_content, reply_text
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Rows,
    Source,
    check_name,
    field,
    from_json,
    load_rows,
    select,
    without_repeats,
)
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import as_typed, comparable, in_validation
from ttrl.text import short

GROUPS = SIZE = 4

_NAME = "nyt_connections"
_log = logging.getLogger(__name__)

_PROMPT = (
    "Here are 16 words:\n\n{words}\n\nThey form 4 groups of 4; the words of a group have "
    "something in common, and each word "
    "belongs to exactly one group. Find the groups. End your reply with exactly 4 lines, one for "
    "each group: its 4 words, "
    "separated by commas, and nothing else on these lines."
)
_NUMBERING = re.compile(r"(?:[-*•–+]|(?:group )?[0-9]{1,2}[.):])\s", re.IGNORECASE)
_AROUND = " \t\r*_`~\"'«»[].;"


@dataclass(frozen=True)
class ConnectionsPuzzle:
    """Four groups of four words, as published."""

    id: str
    groups: tuple[tuple[str, ...], ...]

    def words(self) -> list[str]:
        return [word for group in self.groups for word in group]


@dataclass(frozen=True)
class ConnectionsGrader:
    """Share of the four groups matched exactly by the last four non-empty lines of the reply, after
    any thinking.

    A line is a group's four words, separated by commas, in any order; a group given twice counts
    once. Words are compared as `ttrl.tasks.words.comparable` writes them.
    liberal: forgives numbering, bullets, quotes, bold and italic marks, parentheses (with the
    group's theme, say), code fences, and a full stop at the end.
    """

    groups: tuple[tuple[str, ...], ...]
    liberal: bool = False

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 1 if all four are right}), unless `liberal` also the liberal
        verdict ("lenient"), and the end of the last answer (`ttrl.records.ANSWER_END`).
        """
        answer = after_thinking(reply_text(choice))
        share = self._share(answer, self.liberal)
        metrics = {"exact": float(share == 1)}
        if not self.liberal:
            metrics["lenient"] = float(self._share(answer, True) == 1)
        if answer.strip():
            metrics[ANSWER_END] = place_in_content(choice, answer, _end(answer, self.liberal))
        return share, metrics

    def _share(self, answer: str, liberal: bool) -> float:
        """Return the share of groups found."""
        clean = _clean if liberal else comparable
        wanted = {tuple(sorted(map(clean, group))) for group in self.groups}
        given = {tuple(sorted(line)) for line in read_lines(answer, liberal=liberal)}
        return len(given & wanted) / len(wanted)

    def reference(self) -> str:
        return "\n".join(", ".join(group) for group in self.groups)


def read_lines(text: str, *, liberal: bool = False) -> list[list[str]]:
    """Return the words of the last four non-empty lines, as `comparable` writes them."""
    lines = [line for line in as_typed(text).split("\n") if _counts(line, liberal)]
    cut = []
    for line in lines[-GROUPS:]:
        if len(line) > 2000:
            continue
        if liberal:
            line = _without_parentheses(line).strip()
            if _NUMBERING.match(line.lstrip("*_` ")):
                line = _NUMBERING.sub("", line.lstrip("*_` "), count=1)
        words = map(comparable, line.replace("，", ",").replace("、", ",").split(","))
        cut.append([word.strip(_AROUND) for word in words] if liberal else list(words))
    return cut


def _counts(line: str, liberal: bool) -> bool:
    line = as_typed(line).strip()
    return bool(line) and not (liberal and line.startswith("```"))


def _end(text: str, liberal: bool) -> int:
    """Return the end of the last line to count, in characters; 0 without one."""
    end = position = 0
    for line in text.split("\n"):
        if _counts(line, liberal):
            end = position + len(line.rstrip())
        position += len(line) + 1
    return end


def _clean(word: str) -> str:
    """Return a word of the puzzle as the liberal grader reads it: "U.S." → "U.S"."""
    return comparable(_without_parentheses(word)).strip(_AROUND)


def _without_parentheses(line: str) -> str:
    """Remove parentheses and their content, nested ones too; keep unmatched closing ones."""
    kept = []
    depth = 0
    for character in line:
        if character == "(":
            depth += 1
        elif character == ")" and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)


def get_nyt_connections_tasks(
    split: Literal["train", "validation", "test"] = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source,
    liberal: bool = False,
) -> list[Task]:
    """Return `n` puzzles (None: all of the split), none twice; in train, the seed decides selection
    and order.

    The data has no splits of its own: by a hash of their words, one puzzle in ten is for
    validation, and one in ten for test. path: a file, a folder with a file train.(jsonl, json, csv,
    parquet), or an id on the Hugging Face hub. Rows have their four
        groups as "answers", "groups", "categories" or "board": a list of lists of words, or of
        objects with "members", "words" or the game's own "cards", or one object of {theme: words},
        or of {theme: such an object}. Or there is a row for each word, with "Game ID" (or "id"),
        "Word" and "Group Name"; or a row for each group, with "level" (from the lowest on, game
        after game), "category" and "words".
    liberal: see `ConnectionsGrader`.
    """
    check_name("split", split, ("train", "validation", "test"), _NAME)
    rows = load_rows(path, lambda row: row, splits=("train",))
    puzzles = read_puzzles(rows, str(path))
    places = [f"{path}, game {puzzle.id}" for puzzle in puzzles]
    distinct = without_repeats(Rows(puzzles, places), _words_of, _groups_of, _NAME)
    chosen = select(
        distinct.where(lambda puzzle: _split_of(puzzle) == split),
        _key,
        split,
        n,
        seed,
        _NAME,
        held_out=False,
    )
    return [
        Task(
            question(write_prompt(puzzle)),
            ConnectionsGrader(puzzle.groups, liberal),
            id=f"nyt-connections/{puzzle.id}",
        )
        for puzzle in chosen
    ]


def _key(puzzle: ConnectionsPuzzle) -> str:
    return "/".join(sorted(puzzle.words()))


def _words_of(puzzle: ConnectionsPuzzle) -> frozenset[str]:
    return frozenset(map(comparable, puzzle.words()))


def _groups_of(puzzle: ConnectionsPuzzle) -> list[list[str]]:
    return sorted(sorted(map(comparable, group)) for group in puzzle.groups)


def _split_of(puzzle: ConnectionsPuzzle) -> str:
    key = _key(puzzle)
    if in_validation(f"{_NAME} {key}"):
        return "validation"
    if in_validation(f"{_NAME} test {key}", one_in=9):
        return "test"
    return "train"


def write_prompt(puzzle: ConnectionsPuzzle) -> str:
    """Write the words in an order unrelated to the groups, the same in every run."""
    order = sorted(
        puzzle.words(), key=lambda word: hashlib.sha256(f"{_key(puzzle)} {word}".encode()).digest()
    )
    return _PROMPT.format(words=", ".join(order))


def read_puzzles(rows: Sequence[Row], where: str) -> list[ConnectionsPuzzle]:
    """Read puzzles in any of the formats in `get_nyt_connections_tasks`. Raises TaskError, naming
    the row.

    A file with a row for each word or group comes from programs; boards come from players. In both,
    games other than four groups of four are left out with a warning.
    """
    if not {"Group Name", "group_name", "category"} & rows[0].keys():
        puzzles = []
        broken = []
        for number, row in enumerate(rows, 1):
            try:
                puzzles.append(
                    _puzzle(
                        str(row.get("id", row.get("date", number))), row, f"{where}, row {number}"
                    )
                )
            except TaskError as error:
                if "board" not in rows[0]:
                    raise
                broken.append(error)
        if not puzzles:
            raise broken[0]
        if broken:
            _log.warning(
                "%s: %d of %d games are left out, such as: %s",
                where,
                len(broken),
                len(rows),
                broken[0],
            )
        return puzzles
    games: dict[str, dict[tuple[str, str], list[Any]]] = {}
    level = 0
    game = ""
    for number, row in enumerate(rows, 1):
        try:
            if "category" in row:  # a row for each group, easiest first, without the game's number
                level, before = int(field(row, "level")), level
                if not (level > before and game):
                    game = f"from row {number}"
                games.setdefault(game, {})["", str(field(row, "category"))] = list(
                    _parsed(field(row, "words"))
                )
                continue
            name = str(field(row, "Game ID", "game_id", "id"))
            group = str(field(row, "Group Name", "group_name"))
            if not {"Word", "word"} & row.keys():
                raise RowError("no field 'Word' or 'word'")
            word = row.get("Word", row.get("word"))
        except (RowError, ValueError, TypeError) as error:
            raise TaskError(f"{where}, row {number}: {error}") from None
        games.setdefault(name, {}).setdefault((str(row.get("Group Level", "")), group), []).append(
            word
        )
    whole = {name: groups for name, groups in games.items() if _is_whole(groups.values())}
    if len(whole) < len(games):
        missing = [name for name in games if name not in whole]
        _log.warning(
            "%s: %d of %d games are left out because of missing words: %s",
            where,
            len(missing),
            len(games),
            short(missing, 160),
        )
    if not whole:
        raise TaskError(f"{where}: words are missing in all of its {len(games)} games")
    return [
        _puzzle(name, {"groups": list(groups.values())}, f"{where}, game {name}")
        for name, groups in whole.items()
    ]


def _is_whole(groups: Collection[list[Any]]) -> bool:
    return [len(group) for group in groups] == [SIZE] * GROUPS and all(
        word is not None and word != "" for x in groups for word in x
    )


def _puzzle(name: str, row: Row, place: str) -> ConnectionsPuzzle:
    try:
        value = _parsed(field(row, "answers", "groups", "categories", "solution", "board"))
        groups = tuple(
            _words(group) for group in (value.values() if isinstance(value, dict) else value)
        )
    except (RowError, ValueError, TypeError) as error:
        raise TaskError(f"{place}: {error}") from None
    distinct = {comparable(word) for group in groups for word in group}
    if [len(group) for group in groups] != [SIZE] * GROUPS or len(distinct) != SIZE * GROUPS:
        raise TaskError(
            f"{place}: groups {short(groups, 160)}; give {GROUPS} groups of {SIZE} words, no word "
            "twice"
        )
    return ConnectionsPuzzle(name, groups)


def _parsed(text: Any) -> Any:
    """Parse a list in a csv column, in JSON or Python's notation; return anything but text
    unchanged. Raises ValueError.
    """
    text = from_json(text)
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"groups {short(text, 160)} are neither JSON nor Python's lists") from None


def _words(group: Any) -> tuple[str, ...]:
    """Return the words of a group, commas as spaces: in the answer a comma ends a word."""
    if isinstance(group, dict):
        group = field(group, "members", "words", "cards", "values")
    words = [
        field(word, "content", "image_alt_text") if isinstance(word, dict) else word
        for word in group
    ]
    if isinstance(group, str) or not all(isinstance(word, str) and word.strip() for word in words):
        raise RowError(f"a group is {short(group, 160)}; it must be a list of words")
    return tuple(" ".join(word.replace(",", " ").split()) for word in words)

"""Are the graders right about what is right, and is a wrong answer worth no more than chance?

    python tools/check_tasks.py [DATA] [--seed 0] [--only gsm8k]

DATA holds published data sets in the folders named by SETS (default: ../shared/data); missing sets
are left out. For each set: rows loaded; the share of reference answers that earn 1.0, which must be
all of them; the mean reward when each task is given another task's reference answer, by a random
permutation; and the value expected by chance, with its 99% interval, computed from the answers
themselves, without text and without the grader (Hoeffding 1951, "A combinatorial central limit
theorem": mean and variance of the sum of a permuted matrix; a task may get its own answer).

Exit status 1 if a reference answer earns less than 1.0, or a mean lies outside the interval for
three shuffles in a row.
"""

import argparse
import concurrent.futures
import json
import math
import os
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ttrl.agents.reasoning_gym import REFUSED, families, get_reasoning_gym_tasks
from ttrl.errors import TaskError
from ttrl.tasks.arc_agi import get_arc_agi_tasks
from ttrl.tasks.countdown import evaluate, get_countdown_tasks
from ttrl.tasks.gsm8k import get_gsm8k_tasks
from ttrl.tasks.humaneval.tasks import get_humaneval_tasks
from ttrl.tasks.letter_counting import get_letter_counting_tasks
from ttrl.tasks.math import get_math_tasks
from ttrl.tasks.math.latex import read_answer
from ttrl.tasks.multiple_choice import get_arc_tasks, get_mmlu_tasks
from ttrl.tasks.nyt_connections import get_nyt_connections_tasks
from ttrl.tasks.sort_letters import get_sort_letters_tasks
from ttrl.tasks.spelling import get_spelling_tasks
from ttrl.tasks.task import Task
from ttrl.tasks.temporal_clue import SIZES, get_temporal_clue_tasks
from ttrl.tasks.words import get_words
from ttrl.tasks.zebra_grid import get_zebra_grid_tasks

Matrix = Callable[[Sequence[Any]], np.ndarray]
"""[n, n]: what the answer of task j is worth as an answer to task i, from the graders' expected
answers.
"""


@dataclass(frozen=True)
class Set:
    """One line of the table. path: below DATA; None where tasks are generated."""

    name: str
    path: str | None
    tasks: Callable[[Path], list[Task]]
    matrix: Matrix
    threads: int = 1


def same(answer: Callable[[Any], Any]) -> Matrix:
    """1 where two answers are equal."""

    def matrix(graders: Sequence[Any]) -> np.ndarray:
        numbers: dict[Any, int] = {}
        values = np.array([numbers.setdefault(answer(grader), len(numbers)) for grader in graders])
        return np.equal.outer(values, values)

    return matrix


def grids(graders: Sequence[Any]) -> np.ndarray:
    """ARC-AGI: shapes, and cells of equal shapes. The j-th reply's last grids count; fewer than
    asked for answer the first.
    """

    def share(right: Any, given: Any) -> float:
        a = np.array(right)
        b = np.array(given)
        equal = float((a == b).mean()) if a.shape == b.shape else 0.0
        return 1.0 if equal == 1.0 else graders[0].partial_credit * equal

    values = np.zeros((len(graders), len(graders)))
    for i, one in enumerate(graders):
        for j, other in enumerate(graders):
            given = other.expected[-len(one.expected) :]
            values[i, j] = sum(
                share(right, grid) for right, grid in zip(one.expected, given)
            ) / len(one.expected)
    return values


def moves(graders: Sequence[Any]) -> np.ndarray:
    """Chess: points of the other position's best move here, 1 where it mates here too."""
    import chess

    worth = []
    for grader in graders:
        board = chess.Board(grader.fen)
        known = {move.uci(): grader.points.get(move.uci(), 0.0) for move in board.legal_moves}
        for move in board.legal_moves:
            board.push(move)
            mate = board.is_checkmate()
            board.pop()
            if mate or move.uci() in grader.best:
                known[move.uci()] = 1.0
        worth.append(known)
    return np.array([[known.get(other.best[0], 0.0) for other in graders] for known in worth])


def solutions(graders: Sequence[Any]) -> np.ndarray:
    """Countdown: the same numbers and target, by Python's own arithmetic."""
    read = [evaluate(grader.solution) for grader in graders]
    return np.array(
        [
            [sorted(one.numbers) == sorted(r[1]) and r[0] == one.target for r in read if r]
            for one in graders
        ],
        float,
    )


def functions(graders: Sequence[Any]) -> np.ndarray:
    """HumanEval: another function's name is not defined; the same name with another meaning is
    taken for wrong.
    """
    return np.eye(len(graders))


def mathematical(grader: Any) -> str:
    """Mathematics: what is written, without layout."""
    return str(read_answer(grader.expected))


def places(graders: Sequence[Any]) -> np.ndarray:
    """Letters in their places, half paid."""

    def worth(right: str, given: str) -> float:
        return (
            1.0
            if right == given
            else 0.5 * sum(map(str.__eq__, right, given)) / max(len(right), len(given))
        )

    return np.array([[worth(one.expected, other.expected) for other in graders] for one in graders])


def letters(graders: Sequence[Any]) -> np.ndarray:
    """Temporal-clue: the share of the letters whose values are equal."""

    def share(right: Mapping[str, str], given: Mapping[str, str]) -> float:
        return sum(
            given.get(letter, "").casefold() == value.casefold() for letter, value in right.items()
        ) / len(right)

    return np.array([[share(one.solution, other.solution) for other in graders] for one in graders])


def cells(graders: Sequence[Any]) -> np.ndarray:
    """Zebra-grid: the share of equal cells of a grid of the same height; columns by name where the
    other has all of them.
    """

    def share(right: Any, given: Any) -> float:
        if len(right.rows) != len(given.rows):
            return 0.0
        columns = range(1, len(right.header))
        theirs = (
            [given.header.index(name) for name in right.header[1:]]
            if set(right.header) <= set(given.header)
            else columns
        )
        pairs = [
            (mine[a], row[b])
            for mine, row in zip(right.rows, given.rows)
            for a, b in zip(columns, theirs)
            if b < len(row)
        ]
        return sum(a.casefold() == b.casefold() for a, b in pairs) / (
            len(right.rows) * len(columns)
        )

    return np.array([[share(one, other) for other in graders] for one in graders])


def groups(graders: Sequence[Any]) -> np.ndarray:
    """NYT Connections: the share of equal groups."""
    sets = [
        {frozenset(word.casefold() for word in group) for group in grader.groups}
        for grader in graders
    ]
    return np.array([[len(one & other) / len(one) for other in sets] for one in sets])


def made_up_connections(_: Path) -> list[Task]:
    """Puzzles in NYT Connections' form from generated words, of which many puzzles share a group:
    the real ones are not free.
    """
    draw = random.Random(0)
    words = get_words(5, 8)
    common = [draw.sample(words, 4) for _ in range(20)]
    rows = []
    for _ in range(2000):
        known = draw.choice(common)
        others = draw.sample([word for word in words if word not in known], 12)
        rows.append(
            {
                "answers": [
                    {"members": group} for group in (known, others[:4], others[4:8], others[8:])
                ]
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "puzzles.jsonl")
        path.write_text("\n".join(map(json.dumps, rows)))
        return get_nyt_connections_tasks("test", path=path)


def both_puzzles(path: Path) -> list[Task]:
    """Temporal-clue's published puzzles: what train and validation have of one file."""
    return [
        task
        for part in ("train", "validation")
        for task in get_temporal_clue_tasks(part, None, path=path)
    ]


def chess_tasks(path: Path) -> list[Task]:
    """Imports the package chess."""
    from ttrl.tasks.chess_moves import get_chess_tasks

    return get_chess_tasks("test", path=path)


def both(split: str) -> Callable[[Path], list[Task]]:
    """GSM8K's train file whole, or its test file."""

    def tasks(path: Path) -> list[Task]:
        parts = ("train", "validation") if split == "train" else ("test",)
        return [task for part in parts for task in get_gsm8k_tasks(part, path=path)]  # type: ignore[arg-type]

    return tasks


def colours(graders: Sequence[Any]) -> np.ndarray:
    """Graph colouring: another graph's colouring is right where it has all vertices, and equal
    colours at no edge.
    """

    def fits(puzzle: Any, colouring: Mapping[str, int]) -> bool:
        named = {int(vertex): colour for vertex, colour in colouring.items()}
        known = set(puzzle["vertices"]) == set(named) and set(named.values()) <= set(
            puzzle["color_options"]
        )
        return known and all(named[a] != named[b] for a, b in puzzle["edges"])

    answers = [json.loads(grader.expected) for grader in graders]
    return np.array(
        [
            [fits(grader.entry["metadata"]["puzzle"], answer) for answer in answers]
            for grader in graders
        ],
        float,
    )


def number_or_text(grader: Any) -> Any:
    """The answer of a puzzle of reasoning-gym, as a number where it is one: 0.50 is 0.5."""
    text = grader.expected.strip()
    try:
        return float(Fraction(text.replace(",", "")))
    except (ValueError, ZeroDivisionError):
        return text


def gym(family: str) -> Set:
    """A family of reasoning-gym, small: some take seconds for a puzzle."""
    matrix = colours if family == "graph_color" else same(number_or_text)
    return Set(
        f"reasoning_gym:{family}",
        None,
        lambda _: get_reasoning_gym_tasks(family, "validation", 40),
        matrix,
    )


SETS = [
    Set("gsm8k train", "gsm8k", both("train"), same(lambda g: g.expected)),
    Set("gsm8k test", "gsm8k", both("test"), same(lambda g: g.expected)),
    Set(
        "arc_agi training",
        "arc_agi/training.jsonl",
        lambda p: get_arc_agi_tasks("test", path=p, partial_credit=0.5),
        grids,
    ),
    Set(
        "arc_agi evaluation",
        "arc_agi/evaluation.jsonl",
        lambda p: get_arc_agi_tasks("test", path=p, partial_credit=0.5),
        grids,
    ),
    Set(
        "mmlu",
        "mmlu/mmlu_redux_sample.jsonl",
        lambda p: get_mmlu_tasks(path=p),
        same(lambda g: g.answer),
    ),
    *(
        Set(
            name,
            f"arc_easy_challenge/{name}.jsonl",
            lambda p: get_arc_tasks(path=p),
            same(lambda g: g.answer),
        )
        for name in ("arc_easy_train", "arc_easy_test", "arc_challenge_train", "arc_challenge_test")
    ),
    Set(
        "gsm8k, as mathematics",
        "gsm8k/test.jsonl",
        lambda p: get_math_tasks("test", 300, path=p),
        same(mathematical),
    ),
    Set("math", "math", lambda p: get_math_tasks("test", path=p), same(mathematical)),
    Set("chess, lichess", "chess/lichess_puzzles.jsonl", chess_tasks, moves),
    Set("chess, sts", "chess/sts_positions.jsonl", chess_tasks, moves),
    Set(
        "humaneval",
        "humaneval/HumanEval.jsonl",
        lambda p: get_humaneval_tasks(path=p),
        functions,
        threads=4,
    ),
    Set(
        "spelling, words",
        "words/english_common_words.txt",
        lambda p: get_spelling_tasks("validation", 1000, path=p),
        same(lambda g: g.word),
    ),
    Set("temporal-clue val", "temporal_clue/val.jsonl", both_puzzles, letters),
    Set(
        "temporal-clue made",
        None,
        lambda _: get_temporal_clue_tasks("validation", 100, size=SIZES["small"]),
        letters,
    ),
    Set(
        "zebra-grid made",
        None,
        lambda _: get_zebra_grid_tasks("validation", 200, houses=4, attributes=3),
        cells,
    ),
    Set("connections made-up", None, made_up_connections, groups),
    Set(
        "connections",
        "nyt_connections",
        lambda p: get_nyt_connections_tasks("test", path=p),
        groups,
    ),
    Set("countdown", None, lambda _: get_countdown_tasks("validation", 500), solutions),
    Set(
        "letter_counting",
        None,
        lambda _: get_letter_counting_tasks("validation", 1000),
        same(lambda g: g.expected),
    ),
    Set("sort_letters", None, lambda _: get_sort_letters_tasks("validation", 500), places),
    *map(gym, families()),
]


def rewards(tasks: Sequence[Task], texts: Sequence[str], threads: int) -> list[float]:
    """What each task's grader gives for each text."""

    def grade(task: Task, text: str) -> float:
        choice = types.SimpleNamespace(message=types.SimpleNamespace(content=text))
        output: Any = task.grader(choice)  # type: ignore[misc, arg-type]
        return float(output[0] if isinstance(output, tuple) else output)

    # Mathematics has a time limit that is a signal, which only the main thread gets.
    if threads == 1:
        return list(map(grade, tasks, texts))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(grade, tasks, texts))


def reference(task: Task) -> str:
    """A reply that is right."""
    grader: Any = task.grader
    return grader.reference() if hasattr(grader, "reference") else str(grader.expected)


def chance(values: np.ndarray) -> tuple[float, float]:
    """(mean, standard deviation) of the mean over i of values[i, p(i)], for a uniform permutation
    p.
    """
    count = len(values)
    centred = values - values.mean(0, keepdims=True) - values.mean(1, keepdims=True) + values.mean()
    return float(values.mean()), math.sqrt(float((centred**2).sum()) / (count - 1)) / count


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument(
        "data", nargs="?", type=Path, default=default, help="the folder of published data sets"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only sets whose names contain this")
    arguments = parser.parse_args()
    # Asked for by families that differ between processes; here is but one.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    warnings.simplefilter("ignore")  # of verifiers that meet other tasks' answers
    print(
        f"{'task':36} {'rows':>5}  {'references 1.0':>14}  {'shuffled':>8}  {'chance':>7}  99% "
        "interval"
    )
    wrong = 0
    for item in SETS:
        path = arguments.data / (item.path or "")
        if arguments.only not in item.name or (item.path is not None and not path.exists()):
            continue
        try:
            tasks = item.tasks(path)
        except TaskError as error:
            print(f"{item.name:36} {error}")
            wrong += 1
            continue
        if any(getattr(task.grader, "expected", "") is None for task in tasks):
            print(
                f"{item.name:36} {len(tasks):5}  no right answer is known: it is trained on, and "
                "not checked here",
                flush=True,
            )
            continue
        texts = [reference(task) for task in tasks]
        right = sum(reward == 1.0 for reward in rewards(tasks, texts, item.threads))
        mean, deviation = chance(
            np.asarray(item.matrix([task.grader for task in tasks]), dtype=np.float32)
        )
        low = mean - 2.576 * deviation
        high = mean + 2.576 * deviation
        means: list[float] = []
        for attempt in range(3):
            order = list(range(len(tasks)))
            random.Random(f"{arguments.seed} {attempt}").shuffle(order)
            means.append(sum(rewards(tasks, [texts[i] for i in order], item.threads)) / len(tasks))
            if low <= means[-1] <= high:
                break
        inside = low <= means[-1] <= high
        wrong += right < len(tasks) or not inside
        note = "" if inside else "  OUTSIDE"
        retried = f"  (first {', '.join(f'{m:.4f}' for m in means[:-1])})" if len(means) > 1 else ""
        print(
            f"{item.name:36} {len(tasks):5}  {right / len(tasks):14.4f}  {means[-1]:8.4f}  "
            f"{mean:7.4f}  "
            f"{max(low, 0):.4f} to {high:.4f}{note}{retried}",
            flush=True,
        )
    for family, reason in REFUSED.items():
        if arguments.only in f"reasoning_gym:{family}":
            print(f"reasoning_gym:{family:22} refused: {reason}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

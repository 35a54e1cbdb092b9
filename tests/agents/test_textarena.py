"""Real games of TextArena: alone, against an opponent, the same for all samples of a task while
many go on at once.
"""

import random
import re

import pytest
from support.chat_server import Kit

from ttrl.agents.textarena import get_textarena_tasks, read_move
from ttrl.errors import TaskError
from ttrl.evaluation.families import TaskSpec
from ttrl.tasks.task import RolloutLimits

textarena = pytest.importorskip("textarena")
MOVES = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]


def moving(moves):
    """A model that makes these moves, and thinks of a wrong one first."""

    def behaviour(body, attempt):
        made = sum(message["role"] == "assistant" for message in body["messages"])
        return Kit.completion(
            [Kit.choice(0, f"<think>[B A]?</think>I take <answer>{moves[made]}</answer>")]
        )

    return behaviour


def play(moves, tasks, n=1):
    return Kit.run(
        moving(moves) if isinstance(moves, list) else moves, tasks, n=n, token_ids=False
    )[0]


def test_the_tower_of_hanoi() -> None:
    results = play(MOVES, get_textarena_tasks("TowerOfHanoi-v0", n=2), n=3)
    for sample in (sample for result in results for sample in result.samples):
        assert (sample.error, sample.reward) == (None, 1.0) and sample.metrics == {
            "steps": 7.0,
            "invalid": 0.0,
            "ended": 1.0,
        }
        shown = sample.sent(1)[-1]["content"]
        assert shown.startswith("You moved disk 1 from A to C.") and "A: [3, 2]" in shown
        assert "Tower of Hanoi with 3 disks" in sample.sent(0)[0]["content"]


def test_a_game_at_its_limit_has_no_reward_yet() -> None:
    ((sample,),) = (
        result.samples
        for result in play(
            MOVES, get_textarena_tasks("TowerOfHanoi-v0", n=1, limits=RolloutLimits(turns=3))
        )
    )
    assert (sample.error, sample.reward, sample.metrics["ended"]) == (None, 0.0, 0.0)


def test_games_at_the_same_time_are_the_same_and_leave_other_random_numbers_alone() -> None:
    """The game draws at the start and while it goes on, from Python's global numbers."""

    def adding(body, attempt):
        boards = [message["content"] for message in body["messages"] if message["role"] == "user"]
        return Kit.completion(
            [Kit.choice(0, f"[{['up', 'left', 'down', 'right'][len(boards) % 4]}]")]
        )

    limits = RolloutLimits(turns=12)
    random.seed(5)
    expected = random.Random(5).random()
    results = play(adding, get_textarena_tasks("2048-v0", n=3, limits=limits), n=4)
    assert random.random() == expected
    boards = []
    for result in results:
        seen = [
            [message["content"] for message in sample.sent(11) if message["role"] == "user"]
            for sample in result.samples
        ]
        assert [sample.error for sample in result.samples] == [None] * 4 and seen == [seen[0]] * 4
        boards.append(seen[0])
    assert boards[0] != boards[1] != boards[2] != boards[0]
    alone = play(adding, get_textarena_tasks("2048-v0", n=1, limits=limits))[0].samples[0]
    assert [
        message["content"] for message in alone.sent(11) if message["role"] == "user"
    ] == boards[0]


def test_against_an_opponent() -> None:
    def last_cell(shown: str) -> str:
        free = re.findall(r"\[(\d)\]", shown.rpartition("Available Moves")[2])
        return f"[{free[-1]}]"

    def ending(moves):
        (result,) = play(moves, get_textarena_tasks("TicTacToe-v0", n=1, opponent=last_cell))
        assert result.samples[0].error is None
        return result.samples[0].reward

    assert ending(["0", "1", "2"]) == 1.0  # the opponent takes 8 and 7
    assert ending(["0", "1", "3"]) == -1.0  # 8, 7 and 6


def test_by_name() -> None:
    spec = TaskSpec.parse("textarena:TowerOfHanoi-v0").with_option("num_disks", 4)
    tasks = spec.tasks(2, seed=1)
    assert [task.id for task in tasks] == [task.id for task in spec.tasks(2, seed=2)]
    (result,) = play(
        ["A B"],
        tasks[:1]
        and get_textarena_tasks("TowerOfHanoi-v0", n=1, num_disks=4, limits=RolloutLimits(turns=1)),
    )
    assert "with 4 disks" in result.samples[0].sent(0)[0]["content"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NoSuchGame-v0", {}, "not found"),
        ("TowerOfHanoi-v0", {"disks": 3}, "disks"),
        ("TicTacToe-v0", {}, "number of players has to be 2"),
        ("TicTacToe-v0", {"players": 2}, "needs an opponent"),
    ],
)
def test_what_is_refused(name, options, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        get_textarena_tasks(name, n=1, **options)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<think>[1]</think> [2]", "[2]"),
        ("so <answer> A C </answer>", "[A C]"),
        ("4", "[4]"),
        ("", "[]"),
    ],
)
def test_moves(text: str, move: str) -> None:
    assert read_move(text) == move

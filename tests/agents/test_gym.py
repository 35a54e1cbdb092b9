"""Text games through Gymnasium's interface: every sample of a task plays the same game, and what
goes wrong costs one sample.
"""

import random
import re

import pytest
from support.chat_server import Kit

from ttrl.agents.gym import gym_tasks, tagged_or_last_line
from ttrl.errors import TaskError
from ttrl.tasks.task import RolloutLimits


class HigherOrLower:
    """Guess a number from 0 to 7: 1 for the number, -0.1 for each other guess."""

    opened, closed = 0, 0

    def __init__(self):
        type(self).opened += 1

    def reset(self, *, seed=None, options=None):
        self.number = random.Random(seed).randrange((options or {}).get("numbers", 8))
        return "You have not guessed yet.", {}

    def step(self, action):
        if action == self.number:
            return "Right.", 1.0, True, False, {}
        return "Higher." if action < self.number else "Lower.", -0.1, False, False, {}

    def close(self):
        type(self).closed += 1


def searching(body, attempt):
    """A model that halves what is left."""
    low, high, guess = 0, 7, 0
    for message in body["messages"]:
        if message["role"] == "assistant":
            guess = int(message["content"])
        elif message["content"] == "Higher.":
            low = guess + 1
        elif message["content"] == "Lower.":
            high = guess - 1
    return Kit.completion([Kit.choice(0, str((low + high) // 2))])


def play(behaviour, n=2, tasks=3, make=HigherOrLower, **options):
    given = gym_tasks(
        make, "Guess a number from 0 to 7.", tasks, name="guess", action=int, **options
    )
    return [result.samples for result in Kit.run(behaviour, given, n=n, token_ids=False)[0]]


def test_a_game() -> None:
    """Against the number of halvings, counted here."""
    HigherOrLower.opened = HigherOrLower.closed = 0
    for seed, samples in enumerate(play(searching, tasks=8)):
        number, low, high, guesses = random.Random(seed).randrange(8), 0, 7, 1
        while (guess := (low + high) // 2) != number:
            low, high, guesses = (
                (guess + 1, high, guesses + 1) if guess < number else (low, guess - 1, guesses + 1)
            )
        for sample in samples:
            assert sample.reward == pytest.approx(1.0 - 0.1 * (guesses - 1))
            assert sample.metrics == {"steps": guesses, "invalid": 0.0, "ended": 1.0}
            assert (
                sample.messages[0]["content"] == "Guess a number from 0 to 7."
                and len(sample.turns) == guesses
            )
            assert (
                sample.sent(0)[0]["content"]
                == "Guess a number from 0 to 7.\n\nYou have not guessed yet."
            )
    assert HigherOrLower.opened == HigherOrLower.closed == 1 + 16


def test_a_reply_that_is_no_action_is_told_so() -> None:
    def clumsy(body, attempt):
        if not any("no action" in message["content"] for message in body["messages"]):
            return Kit.completion([Kit.choice(0, "seven")])
        assert (
            re.search("invalid literal", body["messages"][-1]["content"])
            or len(body["messages"]) > 3
        )
        return searching({"messages": body["messages"][3:]}, attempt)

    (samples,) = play(clumsy, tasks=1, n=1)
    assert samples[0].metrics["invalid"] == 1.0 and samples[0].metrics["ended"] == 1.0


def test_a_game_at_its_limit_keeps_its_rewards() -> None:
    wrong = (random.Random(0).randrange(8) + 1) % 8
    (samples,) = play(
        lambda body, attempt: Kit.completion([Kit.choice(0, str(wrong))]),
        tasks=1,
        n=1,
        limits=RolloutLimits(turns=4),
    )
    assert samples[0].reward == pytest.approx(-0.4) and samples[0].metrics == {
        "steps": 4.0,
        "invalid": 0.0,
        "ended": 0.0,
    }


def test_options_and_seeds() -> None:
    tasks = gym_tasks(
        HigherOrLower, "Guess.", 2, name="g", first_seed=5, options={"numbers": 1}, action=int
    )
    assert [task.id for task in tasks] == ["g/5", "g/6"]
    results = Kit.run(
        lambda body, attempt: Kit.completion([Kit.choice(0, "0")]), tasks, token_ids=False
    )[0]
    assert [result.samples[0].reward for result in results] == [1.0, 1.0]


class Old(HigherOrLower):
    def step(self, action):
        return "x", 0.0, True, {}


class Late(HigherOrLower):
    def reset(self, **options):
        raise OSError("no display")


class Nothing(HigherOrLower):
    def step(self, action):
        return "x", None, True, False, {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Old, "step returned .* Gymnasium's returns"),
        (Late, "no display"),
        (Nothing, "step returned the reward None"),
    ],
)
def test_an_environment_that_fails_costs_its_sample(make, message: str) -> None:
    make.opened = make.closed = 0
    (samples,) = play(searching, tasks=1, make=make)
    assert all(sample.reward is None and re.search(message, sample.error) for sample in samples)
    assert make.opened == make.closed == 3


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<answer> [left] </answer> or right", "[left]"),
        ("I go\nleft ", "left"),
        ("<think>right</think>\nleft", "left"),
        ("", ""),
    ],
)
def test_where_the_action_stands(text: str, action: str) -> None:
    assert tagged_or_last_line(text) == action


@pytest.mark.parametrize(
    "options", [{"make": dict}, {"make": lambda: 1 / 0}, {"n": 0}, {"name": ""}, {"prompt": ""}]
)
def test_what_is_refused(options) -> None:
    with pytest.raises(TaskError):
        gym_tasks(**{"make": HigherOrLower, "prompt": "Guess.", "n": 1, "name": "guess", **options})

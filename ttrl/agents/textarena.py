"""Play games of TextArena (MIT; pip install 'ttrl[textarena]'; read: 0.7.4) as rollouts.

The games seed and draw from Python's global random state. Each game has its own state, swapped in
only during its moves, one game at a time. Concurrent games therefore stay reproducible, and other
users of the global state are unaffected.
"""

import functools
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ttrl.agents.gym import Game, GymRollout, seeds
from ttrl.errors import TaskError, describe
from ttrl.messages import JsonObject
from ttrl.tasks.answers import after_thinking, find_tagged, latest
from ttrl.tasks.datasets import check_count
from ttrl.tasks.task import RolloutLimits, Task, question

ASK = (
    "Play the game. Think first; then give your move, in the form that the game asks for, in "
    "<answer> </answer> tags."
)
_moving = threading.Lock()


def get_textarena_tasks(
    name: str,
    split: str = "train",
    n: int = 32,
    seed: int = 0,
    *,
    opponent: Callable[[str], str] | None = None,
    players: int | None = None,
    prompt: str = ASK,
    limits: RolloutLimits | None = None,
    **options: Any,
) -> list[Task]:
    """Return `n` games, such as of "TowerOfHanoi-v0", each with its own seed: drawn by the split,
    and in "train" by `seed`.

    opponent: plays all other players of a game for several: a function from a player's view to a
        move. The model is player 0.
    players: number of players; by default 1, or 2 with an opponent.
    options: of the game, such as `num_disks`.

    The reward is player 0's at the game's end; metrics: `steps`, `ended`. Raises TaskError without
    the package, for unknown games and options, and for games with missing requirements.
    """
    check_count(n)
    count = players or (1 if opponent is None else 2)
    if count > 1 and opponent is None:
        raise TaskError(
            f"textarena:{name} for {count} players needs an opponent: a function of a player's "
            "view of the game"
        )

    def make() -> "TextArenaGame":
        return TextArenaGame(name, count, opponent, options)

    try:
        make().reset(seed=0)
    except ImportError as error:
        raise TaskError(
            f"TextArena's games need the package textarena: pip install 'ttrl[textarena]' ({error})"
        ) from None
    except Exception as error:
        raise TaskError(f"textarena:{name} cannot be played: {describe(error)}") from error
    return [
        Task(
            question(prompt),
            id=f"textarena/{name}/{one}",
            rollout=GymRollout(make, Game(f"textarena:{name}", one, read_move, str)),
            limits=limits or RolloutLimits(),
        )
        for one in seeds(split, n, seed)
    ]


def read_move(text: str) -> str:
    """Return a reply's move: its last `<answer>` tags, else all after its thinking; in brackets, as
    games expect.
    """
    text = after_thinking(text)
    move = latest(text, find_tagged(text))
    if move is None:
        move = text
    if "[" in move:
        return move.strip()
    return f"[{move.strip()}]"


class TextArenaGame:
    """Wrap a game in Gymnasium's methods, seen by player 0. Moves run one at a time, with the
    game's own random state.
    """

    def __init__(
        self,
        name: str,
        players: int,
        opponent: Callable[[str], str] | None,
        options: Mapping[str, Any],
    ) -> None:
        import textarena

        self._players = players
        self._opponent = opponent
        self._own_move = ""
        self._random = random.Random(0).getstate()
        # Skip the wrappers: they repeat the whole history in each observation.
        self._game: Any = self._moved(
            lambda: textarena.make(f"{name.removesuffix('-raw')}-raw", **options)
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, JsonObject]:
        self._moved(lambda: self._game.reset(num_players=self._players, seed=seed))
        shown, done = self._until_own_move(False)
        if done:
            raise ValueError("the game is over before it began")
        return shown, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, JsonObject]:
        self._own_move = action
        done, _ = self._moved(lambda: self._game.step(action=action))
        shown, done = self._until_own_move(done)
        rewards = self._game.close()[0] if done else None
        return shown, float((rewards or {}).get(0, 0.0)), done, False, {}

    def _until_own_move(self, done: bool) -> tuple[str, bool]:
        """Let the others move; return player 0's view, and whether the game is over."""
        while not done:
            player, messages = self._game.get_observation()
            if player == 0:
                return _text(messages, self._own_move), False
            assert self._opponent is not None
            move = self._opponent(_text(messages, None))
            done, _ = self._moved(functools.partial(self._game.step, action=move))
        return "", True

    def _moved(self, move: Callable[[], Any]) -> Any:
        with _moving:
            others = random.getstate()
            random.setstate(self._random)
            try:
                return move()
            finally:
                self._random = random.getstate()
                random.setstate(others)


def _text(messages: Any, own_move: str | None) -> str:
    """Return messages of the game and other players, without the player's own move."""
    said = [
        str(text)
        for _, text, kind in messages
        if kind.name != "PLAYER_ACTION" or str(text) != own_move
    ]
    return "\n".join(said).strip()

"""Choose an iteration's tasks: the next ones of an endless stream. Each round of the stream holds
all tasks in a new order.

With a curriculum, or tasks with levels, the stream depends on measurements: see `Curriculum`.
"""

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.advantages import groups_with_signal, has_signal
from ttrl.facts import CurriculumFacts, RolloutsFacts, Standing
from ttrl.loop.carried import carried_groups, is_open, oldest_version, ready_to_continue, task_key
from ttrl.messages import Message
from ttrl.records import TaskResult
from ttrl.run_folder.folder import RunFolder
from ttrl.tasks.task import Task

_MOST_DOUBLINGS = 4
"""A task is due after at most 2**4 rounds."""
_RIGHT = 1.0 - 1e-9
"""Scores from here on count as right, as in pass@k."""


def further_tasks(
    groups: Sequence[TaskResult],
    config: TrainConfig,
    extra: int,
    new_tokens: int,
    tokenizer: Callable[[], Any],
) -> int:
    """Return how many more tasks to sample now; 0 with enough groups with signal, or at a limit.

    groups: all of the iteration so far. extra: number of further tasks among them. new_tokens:
    completion tokens sampled in this iteration, for `tokens_per_iteration`; an unfinished group
    means a spent budget.

    The number follows from the missing groups and the share of groups with signal so far. It is at
    most the number sampled before, since a small share is a poor estimate.
    """
    wanted = config.dynamic_sampling
    budget = config.tokens_per_iteration
    if wanted is None or any(map(is_open, groups)) or (budget is not None and new_tokens >= budget):
        return 0
    advantages = config.advantage_config()
    needed = tokenizer() if advantages.surprise_until is not None else None
    kept = groups_with_signal(groups, advantages, needed)
    if kept >= wanted:
        return 0
    share = (kept + 1) / (len(groups) + 2)  # Laplace's rule: neither 0 nor 1 is ever certain
    return max(
        0, min(math.ceil((wanted - kept) / share), len(groups), config.extra_task_limit - extra)
    )


def _in_order(seed: int, turn: int, total: int) -> list[int]:
    """Return the places of all tasks in the order of one round."""
    order = list(range(total))
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order


class TaskStream:
    """The task stream of a run. An iteration's place in it follows from the earlier markers."""

    def __init__(self, config: TrainConfig, folder: RunFolder, tasks: list[Task]) -> None:
        self._config = config
        self._folder = folder
        self._tasks = tasks
        chooses = config.curriculum or len({task.level for task in tasks}) > 1
        # A replay packs and trains existing samples, and has no tasks.
        self._curriculum = Curriculum(config, folder, tasks) if tasks and chooses else None

    def tasks_from(self, first: int, count: int) -> list[Task]:
        """Return part of the stream in its plain order, without measurements."""
        total = len(self._tasks)
        orders: dict[int, list[int]] = {}
        chosen = []
        for place in range(first, first + count):
            turn, position = divmod(place, total)
            if turn not in orders:
                orders[turn] = _in_order(self._config.seed, turn, total)
            chosen.append(self._tasks[orders[turn][position]])
        return chosen

    def more(self, number: int, taken: int, count: int, present: Sequence[Task] = ()) -> list[Task]:
        """Return the next tasks for iteration `number` after `taken` tasks of the stream; the
        iteration has `present` already.
        """
        if self._curriculum is None:
            return self.tasks_from(taken, count)
        return self._curriculum.choose(number, count, present)

    def measured(self, number: int, finished: Sequence[TaskResult]) -> CurriculumFacts | None:
        """Return an iteration's measurements for its marker; later iterations need them."""
        if self._curriculum is None:
            return None
        return self._curriculum.measured(number, finished)

    def taken_before(self, number: int) -> int:
        """Return how many tasks earlier iterations took. Read it from the last marker, since
        `tasks_per_iteration` may have changed; without it, assume equal parts.
        """
        marker = self._folder.iteration(number - 1).marker(RolloutsFacts)
        if marker is None or marker.tasks_taken is None:
            return (number - 1) * self._config.tasks_per_iteration
        return marker.tasks_taken

    def tasks_of(self, number: int) -> list[Task]:
        """Return the first tasks of an iteration without a token budget."""
        return self.more(number, self.taken_before(number), self._config.tasks_per_iteration)

    def continued(self, number: int, version: int) -> tuple[list[TaskResult], list[Task], int, int]:
        """Return, for a token budget, the groups to continue, all tasks of the iteration (theirs
        first), the new number of tasks taken from the stream, and the number of dropped groups.

        New tasks follow in the stream on those taken so far, as counted by the markers.
        """
        previous = self._folder.iteration(number - 1)
        taken = self.taken_before(number)
        known = {task_key(task.id, task.messages): task for task in self._tasks}
        groups = carried_groups(previous)
        limit = self._config.max_staleness
        carried = [
            ready_to_continue(group, version)
            for group in groups
            # The allowed tasks may have changed since.
            if task_key(group.task_id, group.messages) in known
            and (limit is None or version - oldest_version(group, version) <= limit)
        ]
        tasks = [known[task_key(group.task_id, group.messages)] for group in carried]
        new = self.more(
            number, taken, max(0, self._config.tasks_per_iteration - len(carried)), tasks
        )
        return (
            carried,
            tasks + new,
            taken + len(new),
            len(groups) - len(carried),
        )


class Curriculum:
    """Choose tasks by the policy's results at their last turn, and by their levels.

    Turns are counted in rounds. After its turn a task is due in the next round. If its samples all
    got the same reward, it is due 2 rounds later, and after more such turns in a row 3 or 4, 5 to
    8, 9 to 16: drawn by chance, to spread tasks solved in one round over later ones. Tasks come by
    due round; tasks never sampled are due in round 0. So every task returns, up to 16 times as
    often if it teaches something (stride scheduling, Waldspurger 1995). While all tasks do, the
    rounds are those of the plain stream.

    The marker of an iteration's rollouts holds its measurements; all else follows from the earlier
    markers and the seed.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, tasks: list[Task]) -> None:
        self._config = config
        self._folder = folder
        self._tasks = tasks
        self._keys = [_digest(task.id, task.messages) for task in tasks]
        self._level_of = dict(zip(self._keys, (task.level for task in tasks), strict=True))
        self._levels = sorted(set(self._level_of.values()))
        self._read = 0
        """The iteration of the last marker read; the state below is the one after it."""
        self._turns: dict[str, Standing] = {}
        self._round, self._level = 0, self._levels[0]
        """The latest round with a turn, and the highest open level."""
        self._scores: list[tuple[str, float]] = []
        """Scores, with their tasks, of the last groups of this level since it was opened."""

    def choose(self, number: int, count: int, present: Sequence[Task]) -> list[Task]:
        """Return `count` tasks for iteration `number`, with `present` already in it; repeat a task
        only if no others are left."""
        self._read_until(number - 1)
        had = {_digest(task.id, task.messages) for task in present}
        fresh = (place for place in self._by_turn() if self._keys[place] not in had)
        chosen = itertools.islice(itertools.chain(fresh, itertools.cycle(self._by_turn())), count)
        return [self._tasks[place] for place in chosen]

    def _by_turn(self) -> Iterator[int]:
        """Yield the places of all tasks of open levels, alternating between the highest level and
        all others.
        """
        *others, highest = [
            level for level in self._levels if level <= self._level
        ] or self._levels[:1]
        pairs = itertools.zip_longest(self._due({highest}), self._due(set(others)))
        return (place for pair in pairs for place in pair if place is not None)

    def _due(self, levels: Collection[int]) -> Iterator[int]:
        """Yield the places of the tasks of `levels`: earliest due first, then in round order."""
        rounds: dict[int, set[int]] = {}
        for place, (task, key) in enumerate(zip(self._tasks, self._keys, strict=True)):
            if task.level in levels:
                rounds.setdefault(self._turns[key].due if key in self._turns else 0, set()).add(
                    place
                )
        for number in sorted(rounds):
            yield from (
                place
                for place in _in_order(self._config.seed, number, len(self._tasks))
                if place in rounds[number]
            )

    def measured(self, number: int, finished: Sequence[TaskResult]) -> CurriculumFacts:
        """Return the changes from the groups of iteration `number` and the new standing of all
        tasks, for the marker and the metrics.

        unseen: number of tasks never graded. The others count by their last grades: between, with
        different rewards; solved, with equal rewards and all right by `validation_metric`;
        hopeless, the rest. level: the highest open one; level_score: the mean score of its tasks.
        """
        self._read_until(number - 1)
        turns: dict[str, Standing] = {}
        scores = list(self._scores)
        for group in finished:
            key = _digest(group.task_id, group.messages)
            last = turns.get(key) or self._turns.get(key) or Standing(0, 0, 0, None)
            now = max(last.due, self._round)
            without = last.without
            score = last.score
            if len(group.rewards) > 1:
                if has_signal(group.rewards):
                    without = 0
                else:
                    without = without + 1
                name = self._config.validation_metric
                given = [
                    sample.metrics.get(name, reward)
                    for sample, reward in zip(group.graded, group.rewards, strict=True)
                ]
                score = math.fsum(given) / len(given)
                scores += [(key, score)] if self._level_of.get(key) == self._level else []
            turns[key] = Standing(now, now + self._wait(key, now, without), without, score)
        newest = max((turn.round for turn in turns.values()), default=self._round)
        known = self._turns | turns
        counts = Counter(_state(known.get(key)) for key in self._keys)
        facts = CurriculumFacts(
            round=newest,
            turns=turns,
            total=len(self._keys),
            unseen=counts["unseen"],
            solved=counts["solved"],
            hopeless=counts["hopeless"],
            between=counts["between"],
        )
        if len(self._levels) == 1:
            return facts
        level, score, scores = self._after(known, newest, scores)
        return facts.replace(level=level, level_score=score, level_scores=scores)

    def _wait(self, key: str, now: int, without: int) -> int:
        """Return in how many rounds a task is due."""
        if not self._config.curriculum or not without:
            return 1
        longest = 2 ** min(without, _MOST_DOUBLINGS)
        return random.Random(f"{self._config.seed}/{key}/{now}").randint(longest // 2 + 1, longest)

    def _after(
        self, turns: Mapping[str, Standing], now: int, scores: list[tuple[str, float]]
    ) -> tuple[int, float | None, list[tuple[str, float]]]:
        """Return the level, its mean score, and the underlying scores. Tasks left out of this round
        count with their own last score. All other tasks with a turn count with the mean of the last
        groups, as their own scores may be old.
        """
        window = self._config.tasks_per_iteration
        scores = scores[-window:]
        mean = None
        seen = {
            key: turn
            for key, turn in turns.items()
            if self._level_of.get(key) == self._level and turn.score is not None
        }
        absent = {
            key: turn.score or 0.0 for key, turn in seen.items() if turn.round < now < turn.due
        }
        recent = [score for key, score in scores if key in seen and key not in absent]
        if recent:
            others = (len(seen) - len(absent)) * math.fsum(recent) / len(recent)
            mean = (others + math.fsum(absent.values())) / len(seen)
        elif absent:
            mean = math.fsum(absent.values()) / len(absent)
        higher = [level for level in self._levels if level > self._level]
        if (
            higher
            and mean is not None
            and len(scores) >= window
            and mean >= self._config.level_up_at
        ):
            return higher[0], None, []
        return self._level, mean, scores

    def _read_until(self, number: int) -> None:
        assert self._read <= number, "iterations sample one after the other"
        while self._read < number:
            self._read += 1
            marker = self._folder.iteration(self._read).marker(RolloutsFacts)
            if marker is None or marker.curriculum is None:
                continue  # the run had none then
            found = marker.curriculum
            self._turns |= found.turns
            self._round = found.round or 0
            if found.level is not None:
                self._level = found.level
            self._scores = found.level_scores or []


def _state(turn: Standing | None) -> str:
    if turn is None or turn.score is None:
        return "unseen"
    if not turn.without:
        return "between"
    if turn.score >= _RIGHT:
        return "solved"
    return "hopeless"


def _digest(task_id: str, messages: list[Message]) -> str:
    return hashlib.sha256(task_key(task_id, messages).encode()).hexdigest()[:12]

"""Clues: true sentences about a scene, and their meanings in clauses.

Kinds: associational (the owner of a motive), spatial (room, adjacent room, same room), temporal
(moves, stays, together at least once) and logical (or; if and only if).
"""

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ttrl.tasks.temporal_clue.rules import Rules, Subject
from ttrl.tasks.temporal_clue.scene import DIRECTIONS, VICTIM, Scene
from ttrl.tasks.words import pick


class Clue(NamedTuple):
    """A sentence without its capital and full stop, and a function for its meaning: clauses, all of
    them true.
    """

    text: str
    says: Callable[[Rules], Iterable[list[int]]]
    reach: int = 1
    """0 for a self-sufficient fact, 1 for a relation to be combined with others."""

    def sentence(self) -> str:
        return f"{self.text[:1].upper()}{self.text[1:]}."


Maker = Callable[[random.Random, Scene], Clue | None]


def draw_clue(rng: random.Random, scene: Scene) -> Clue:
    has = {"all": True, "moves": scene.moves, "motives": bool(scene.motives)}
    makers = [(maker, weight) for maker, weight, scenes in _MAKERS if has[scenes]]
    while True:
        place = rng.random() * sum(weight for _, weight in makers)
        for maker, weight in makers:
            place -= weight
            if place < 0:
                clue = maker(rng, scene)
                if clue is not None:
                    return clue
                break


def _in(scene: Scene, r: int) -> str:
    return f"in the {scene.rooms[r]}"


def _subject(rng: random.Random, scene: Scene, *, weapons: bool = True) -> Subject:
    """Draw a random subject, sometimes a role."""
    mover = int(rng.random() * (scene.movers if weapons else len(scene.suspects) + 1))
    role = rng.random()
    if mover < len(scene.suspects):
        if role < 0.08:
            return Subject("murderer")
        if scene.motives and role < 0.4:
            return Subject("motive", int(rng.random() * len(scene.motives)))
    elif mover > scene.victim and role < 0.12:
        return Subject("murder weapon")
    return Subject("mover", mover)


def _room_of(rng: random.Random, scene: Scene, subject: Subject, t: int) -> int:
    return scene.where[pick(rng, subject.movers(scene))][t]


def _time(rng: random.Random, scene: Scene, first: int = 0) -> int:
    return first + int(rng.random() * (len(scene.times) - first))


def _placed(rng: random.Random, scene: Scene) -> Clue:
    subject = _subject(rng, scene)
    t = _time(rng, scene)
    r = _room_of(rng, scene, subject, t)
    return Clue(
        f"{subject.text(scene)} was {_in(scene, r)}{scene.at(t)}",
        lambda rules: [[rules.was_at(subject, t, r)]],
        reach=0,
    )


def _for_some(
    rules: Rules, subject: Subject, says: Callable[[int], Iterable[list[int]]]
) -> Iterator[list[int]]:
    """State `says` for at least one of the subject's possible movers."""
    conditions = []
    for holder, mover in rules.holders(subject):
        condition = rules.clauses.new_variable()
        conditions.append(condition)
        yield [-condition, holder]
        yield from ([-condition, *clause] for clause in says(mover))
    yield conditions


def _apart(rules: Rules, mover: int, other: Subject) -> list[list[int]]:
    """Exclude `other` being this mover: no clue puts a mover in the same room as itself."""
    return [[-holder] for holder, another in rules.holders(other) if another == mover]


def _moved(rng: random.Random, scene: Scene) -> Clue | None:
    """Report a move, perhaps with a weapon: for "a suspect motivated by", the same suspect is in
    both rooms.
    """
    subject = _subject(rng, scene, weapons=False)
    t = _time(rng, scene, 1)
    mover = pick(rng, subject.movers(scene))
    before, after = scene.where[mover][t - 1 : t + 1]
    if before == after:
        return None
    things = [Subject("mover", scene.weapon(w)) for w in range(len(scene.weapons))] + [
        Subject("murder weapon")
    ]
    carried = [
        x
        for x in things
        if mover != scene.victim
        and scene.where[x.movers(scene)[0]][t - 1 : t + 1] == (before, after)
    ]
    if carried and rng.random() < 0.6:
        thing = pick(rng, carried)
    else:
        thing = None

    def says(rules: Rules) -> Iterator[list[int]]:
        yield from _for_some(
            rules, subject, lambda one: [[rules.at[one][t - 1][before]], [rules.at[one][t][after]]]
        )
        if thing is not None:
            yield [rules.was_at(thing, t - 1, before)]
            yield [rules.was_at(thing, t, after)]

    if thing is not None:
        taking = f" {thing.text(scene)}"
    else:
        taking = ""
    route = f"from the {scene.rooms[before]} to the {scene.rooms[after]}"
    return Clue(f"{subject.text(scene)} moved{taking} {route}{scene.at(t)}", says, reach=0)


def _stayed(rng: random.Random, scene: Scene) -> Clue | None:
    subject = _subject(rng, scene)
    first = _time(rng, scene)
    mine = subject.movers(scene)
    if len(mine) > 1:
        return None
    steps = scene.where[mine[0]]
    last = first
    while last + 1 < len(steps) and steps[last + 1] == steps[first]:
        last += 1
    if last == first:
        return None
    r = steps[first]
    return Clue(
        f"{subject.text(scene)} was {_in(scene, r)} from {scene.times[first]} to "
        f"{scene.times[last]}",
        lambda rules: [[rules.was_at(subject, t, r)] for t in range(first, last + 1)],
        reach=0,
    )


def _never(rng: random.Random, scene: Scene) -> Clue | None:
    subject = _subject(rng, scene)
    r = int(rng.random() * len(scene.rooms))
    mine = subject.movers(scene)
    if len(mine) > 1 or r in scene.where[mine[0]]:
        return None
    return Clue(
        f"{subject.text(scene)} was {'never' if scene.moves else 'not'} {_in(scene, r)}",
        lambda rules: [[-rules.was_at(subject, t, r)] for t in range(len(scene.times))],
    )


def _two(
    rng: random.Random, scene: Scene, *, both_single: bool = False
) -> tuple[Subject, Subject] | None:
    """Draw two subjects of different names; the second, or each of them, is exactly one mover."""
    one = _subject(rng, scene)
    other = _subject(rng, scene)
    if one == other or len(other.movers(scene)) > 1 or (both_single and len(one.movers(scene)) > 1):
        return None
    # "The murderer was in the same room as the murderer's name" would give the solution away, or
    # say nothing.
    if set(one.movers(scene)) & set(other.movers(scene)):
        return None
    return (one, other)


def _same_room(rng: random.Random, scene: Scene) -> Clue | None:
    pair = _two(rng, scene)
    t = _time(rng, scene)
    if pair is None:
        return None
    one, other = pair
    places = [scene.where[mover][t] for mover in one.movers(scene)]
    if scene.where[other.movers(scene)[0]][t] not in places:
        return None

    def says(rules: Rules, mover: int) -> Iterator[list[int]]:
        yield from _apart(rules, mover, other)
        for mine, theirs in zip(rules.at[mover][t], rules.rooms_of(other, t), strict=True):
            yield [-mine, theirs]
            yield [mine, -theirs]

    return Clue(
        f"{one.text(scene)} was in the same room as {other.text(scene)}{scene.at(t)}",
        lambda rules: _for_some(rules, one, functools.partial(says, rules)),
    )


def _beside(rng: random.Random, scene: Scene) -> Clue | None:
    pair = _two(rng, scene, both_single=True)
    t = _time(rng, scene)
    if pair is None:
        return None
    one, other = pair
    place, base = (scene.where[x.movers(scene)[0]][t] for x in pair)
    directions = [
        direction for direction in DIRECTIONS if scene.neighbour(base, direction) == place
    ]
    if not directions:
        return None
    direction = directions[0]

    def says(rules: Rules) -> Iterator[list[int]]:
        mine = rules.rooms_of(one, t)
        theirs = rules.rooms_of(other, t)
        beside = [scene.neighbour(r, direction) for r in range(len(scene.rooms))]
        for there, r in zip(theirs, beside, strict=True):
            yield [-there] if r is None else [-there, mine[r]]
        yield from ([-here] for r, here in enumerate(mine) if r not in beside)

    return Clue(
        f"{one.text(scene)} was in the room just {direction} of {other.text(scene)}{scene.at(t)}",
        says,
    )


def _together(rng: random.Random, scene: Scene) -> Clue | None:
    pair = _two(rng, scene, both_single=True)
    if pair is None:
        return None
    one, other = pair
    mine, theirs = (scene.where[x.movers(scene)[0]] for x in pair)
    shared = [r for r, s in zip(mine, theirs) if r == s]
    if not shared:
        return None
    room = pick(rng, shared)

    def says(rules: Rules) -> Iterator[list[int]]:
        yield from _for_some(rules, one, lambda mover: _apart(rules, mover, other))
        meetings = [rules.clauses.new_variable() for _ in scene.times]
        for t, meeting in enumerate(meetings):
            yield [-meeting, rules.was_at(one, t, room)]
            yield [-meeting, rules.was_at(other, t, room)]
        yield meetings

    return Clue(
        f"{one.text(scene)} and {other.text(scene)} were {_in(scene, room)} together at least once",
        says,
    )


def _logical(rng: random.Random, scene: Scene) -> Clue | None:
    """Join two statements: one of them is true, or both or neither."""
    or_clue = rng.random() < 0.5
    statements = []
    truths = []
    for _ in range(2):
        subject = _subject(rng, scene)
        t = _time(rng, scene)
        true = rng.random() < 0.5
        if true:
            r = _room_of(rng, scene, subject, t)
        else:
            r = int(rng.random() * len(scene.rooms))
        statements.append((subject, t, r))
        truths.append(r in [scene.where[mover][t] for mover in subject.movers(scene)])
    if statements[0] == statements[1] or not (any(truths) if or_clue else truths[0] == truths[1]):
        return None

    def says(rules: Rules) -> list[list[int]]:
        first, second = (rules.was_at(*statement) for statement in statements)
        if or_clue:
            return [[first, second]]
        return [[first, -second], [-first, second]]

    texts = [
        f"{subject.text(scene)} was {_in(scene, r)}{scene.at(t)}" for subject, t, r in statements
    ]
    return Clue((" or " if or_clue else " if and only if ").join(texts), says)


def _motive(rng: random.Random, scene: Scene) -> Clue:
    s = int(rng.random() * len(scene.suspects))
    m = scene.motive_of[s]
    return Clue(
        f"{scene.suspects[s]} was motivated by {scene.motives[m]}",
        lambda rules: [[rules.motive[s][m]]],
        reach=0,
    )


def told_facts(scene: Scene) -> dict[str, Clue]:
    """Return, by question, the direct clue to its answer, for questions not asked."""
    facts = {
        "weapon": Clue(
            f"{VICTIM} was killed with the {scene.weapons[scene.murder_weapon]}",
            lambda rules: [[rules.weapon[scene.murder_weapon]]],
        )
    }
    if scene.moves:
        facts["time"] = Clue(
            f"{VICTIM} was murdered at {scene.times[scene.murder_time]}",
            lambda rules: [[rules.time[scene.murder_time]]],
        )
    if scene.motives:
        motive = scene.motive_of[scene.murderer]
        facts["motive"] = Clue(
            f"the murderer was motivated by {scene.motives[motive]}",
            lambda rules: [
                [-murderer, own[motive]] for murderer, own in zip(rules.murderer, rules.motive)
            ],
        )
    return facts


# (maker, number of tries, scenes); most tries of the later ones find nothing true.
_MAKERS: tuple[tuple[Maker, float, str], ...] = (
    (_placed, 2.0, "all"),
    (_moved, 6.0, "moves"),
    (_stayed, 1.5, "moves"),
    (_never, 0.7, "all"),
    (_same_room, 20.0, "all"),
    (_beside, 20.0, "all"),
    (_together, 8.0, "moves"),
    (_logical, 6.0, "all"),
    (_motive, 1.0, "motives"),
)

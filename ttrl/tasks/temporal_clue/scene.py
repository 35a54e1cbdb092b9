"""Draw the scene of a puzzle: all places at each time, the murder, and the prompt's description of
the world.

Indices: s suspect, w weapon, r room, t time, m motive. Movers are the suspects, then the victim,
then the weapons.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttrl.errors import TaskError
from ttrl.tasks.words import pick, shuffled

VICTIM = "Lord Ashgrove"
SUSPECTS = (
    "Miss Violet", "Captain Amber", "Doctor Indigo", "Lady Cerise", "Father Umber", "Madam Olive",
    "Judge Sable", "Mr. Cobalt", "Mrs. Saffron", "Baron Russet", "Nurse Ivory", "Major Teal",
)  # fmt: skip
WEAPONS = (
    "Dagger",
    "Pistol",
    "Fire Iron",
    "Silk Scarf",
    "Arsenic",
    "Bronze Bust",
    "Hatchet",
    "Bow",
    "Razor",
    "Walking Stick",
)
ROOMS = (
    "Armoury", "Attic", "Boathouse", "Cellar", "Chapel", "Gallery", "Greenhouse", "Laundry",
    "Map Room", "Music Room", "Nursery", "Orchard", "Pantry", "Parlour", "Salon", "Stables",
    "Tea Room", "Wine Cellar",
)  # fmt: skip
MOTIVES = (
    "Envy", "Shame", "Debt", "Love", "Grief", "Vengeance", "Loyalty", "Boredom", "Contempt",
    "Despair", "Inheritance", "Rivalry",
)  # fmt: skip
DIRECTIONS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
SHARED_MOTIVES_AT_MOST = 5

Motives = Literal["none", "own", "shared"]


@dataclass(frozen=True)
class PuzzleSize:
    """The size of a puzzle. Raises TaskError for an impossible one."""

    suspects: int
    weapons: int
    rooms: int
    times: int
    """1: all stay in place, and the clues and questions name no time."""
    motives: Motives = "own"
    """none; own: each suspect has a different one; shared: fewer than suspects, and the prompt
    gives the number of suspects for each.
    """

    def __post_init__(self) -> None:
        limits = {
            "suspects": len(SUSPECTS),
            "weapons": len(WEAPONS),
            "rooms": len(ROOMS),
            "times": 12,
        }
        for name, most in limits.items():
            least = 1 if name == "times" else 2
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise TaskError(
                    f"temporal-clue: {name} is {value!r}; give a whole number from {least} to "
                    f"{most}"
                )
        if self.motives not in ("none", "own", "shared"):
            raise TaskError(
                f"temporal-clue: motives is {self.motives!r}; give 'none', 'own' or 'shared'"
            )
        if self.rooms * 3 < self.suspects:
            raise TaskError(
                f"temporal-clue: {self.suspects} suspects are too many for {self.rooms} rooms; "
                "give more rooms"
            )


@dataclass(frozen=True)
class Scene:
    """The whole truth; `where[mover][t]` is a room."""

    suspects: tuple[str, ...]
    weapons: tuple[str, ...]
    rooms: tuple[str, ...]
    times: tuple[str, ...]
    motives: tuple[str, ...]
    width: int
    """Rooms in a row of the board."""
    motive_of: tuple[int, ...]
    """By suspect; empty without motives."""
    where: tuple[tuple[int, ...], ...] = ()
    murderer: int = 0
    murder_weapon: int = 0
    murder_time: int = 0

    @property
    def victim(self) -> int:
        return len(self.suspects)

    @property
    def movers(self) -> int:
        return len(self.suspects) + 1 + len(self.weapons)

    @property
    def murder_room(self) -> int:
        return self.where[self.victim][self.murder_time]

    @property
    def moves(self) -> bool:
        """Whether there are several times, for clues and questions to name."""
        return len(self.times) > 1

    def at(self, t: int) -> str:
        """Return " at 11:30 PM", or nothing if there is one time."""
        if self.moves:
            return f" at {self.times[t]}"
        return ""

    def weapon(self, w: int) -> int:
        """Return the mover of a weapon."""
        return len(self.suspects) + 1 + w

    def motive_count(self, m: int) -> int:
        return self.motive_of.count(m)

    def neighbour(self, r: int, direction: str) -> int | None:
        """Return the room just north, south, east or west of another; None at the edge of the
        board.
        """
        right, down = DIRECTIONS[direction]
        column = r % self.width + right
        row = r // self.width + down
        other = row * self.width + column
        if 0 <= column < self.width and row >= 0 and other < len(self.rooms):
            return other
        return None

    def neighbours(self, r: int) -> list[int]:
        """Return the rooms one move away."""
        return [
            other for direction in DIRECTIONS if (other := self.neighbour(r, direction)) is not None
        ]


def draw_scene(rng: random.Random, size: PuzzleSize) -> Scene:
    """Draw a random night with the opportunity for a murder."""
    motives: tuple[str, ...] = ()
    motive_of: tuple[int, ...] = ()
    suspects = tuple(shuffled(rng, SUSPECTS)[: size.suspects])
    if size.motives != "none":
        if size.motives == "own":
            count = size.suspects
        else:
            count = min(SHARED_MOTIVES_AT_MOST, max(1, (size.suspects + 1) // 2))
        motives = tuple(shuffled(rng, MOTIVES)[:count])
        motive_of = tuple(
            shuffled(
                rng,
                [*range(count), *(int(rng.random() * count) for _ in range(size.suspects - count))],
            )
        )
    step = pick(rng, (15, 30, 60))
    start = (18 + int(rng.random() * 6)) * 60 + (0 if step == 60 else 30 * int(rng.random() * 2))
    rooms = tuple(shuffled(rng, ROOMS)[: size.rooms])
    width = next(width for width in range(1, size.rooms + 1) if width * width >= size.rooms)
    times = tuple(_clock(start + step * t) for t in range(size.times))
    house = Scene(suspects, (), rooms, times, motives, width, motive_of)
    for _ in range(100_000):
        scene = replace(house, weapons=tuple(shuffled(rng, WEAPONS)[: size.weapons]))
        scene = replace(scene, where=_walk(rng, scene))
        chances = _chances(scene)
        if chances:
            murderer, weapon, time = pick(rng, chances)
            return replace(scene, murderer=murderer, murder_weapon=weapon, murder_time=time)
    raise TaskError(
        f"temporal-clue: no murder is possible in {size}; give fewer suspects, or more rooms or "
        "weapons"
    )


def _clock(minutes: int) -> str:
    """Write minutes since midnight: 1425 → "11:45 PM"."""
    hour = minutes // 60 % 24
    minute = minutes % 60
    return f"{(hour + 11) % 12 + 1:02d}:{minute:02d} {'AM' if hour < 12 else 'PM'}"


def _walk(rng: random.Random, scene: Scene) -> tuple[tuple[int, ...], ...]:
    """Let everybody stay or move to a neighbouring room; a weapon may go with a suspect leaving its
    room.
    """
    rooms = range(len(scene.rooms))
    where = [[pick(rng, rooms)] for _ in range(scene.movers)]
    people = len(scene.suspects) + 1
    for _ in scene.times[1:]:
        for steps in where[:people]:
            steps.append(
                steps[-1] if rng.random() < 0.35 else pick(rng, scene.neighbours(steps[-1]))
            )
        for steps in where[people:]:
            leaving = [
                other
                for other in where[: people - 1]
                if other[-2] == steps[-1] and other[-1] != steps[-1]
            ]
            steps.append(pick(rng, leaving)[-1] if leaving and rng.random() < 0.5 else steps[-1])
    return tuple(map(tuple, where))


def _chances(scene: Scene) -> list[tuple[int, int, int]]:
    """Return every (suspect, weapon, time) with the weapon and no other suspect in the victim's
    room.
    """
    chances = []
    where = scene.where
    suspects = range(len(scene.suspects))
    for t in range(len(scene.times)):
        room = where[scene.victim][t]
        there = [s for s in suspects if where[s][t] == room]
        if len(there) == 1:
            chances += [
                (there[0], w, t)
                for w in range(len(scene.weapons))
                if where[scene.weapon(w)][t] == room
            ]
    return chances


def describe(scene: Scene) -> str:
    """Write the prompt up to the clues: people, things, board, times, motives and rules."""
    digits = len(str(len(scene.rooms)))
    parts = [
        f"{VICTIM} invited a few acquaintances to his country house. Before the night was over, "
        "he had been murdered in one "
        "of its rooms. Exactly one of these suspects did it:",
        _bullets(scene.suspects),
        "Exactly one of these weapons, all of them somewhere in the house, was used:",
        _bullets(scene.weapons),
        "These are the rooms:",
        "\n".join(f"{number:0{digits}d}. {room}" for number, room in enumerate(scene.rooms, 1)),
        "and this is how they lie, seen from above (N north, E east, S south, W west):",
        _board(scene),
    ]
    if scene.moves:
        parts += [
            "The murder happened at one of these times:",
            _bullets(scene.times),
            f"From each time to the next, every suspect and {VICTIM} stayed where they were or "
            "moved to a neighbouring room "
            "(just north, south, east or west of it). A weapon stayed in its room unless a "
            "suspect who made the same move took "
            "it along. "
            'Where a clue says that somebody "moved from" one room to another at a time, they '
            "were in the first room at the time "
            "before and in the second room at that time.",
        ]
    if scene.motives:
        if len(scene.motives) == len(scene.suspects):
            parts += ["Every suspect has a motive, each another one:", _bullets(scene.motives)]
        else:
            counts = [scene.motive_count(m) for m in range(len(scene.motives))]
            named = [
                f"{name} ({count} suspect{'s' * (count > 1)})"
                for name, count in zip(scene.motives, counts)
            ]
            parts += ["Every suspect has one of these motives:", _bullets(named)]
    parts.append(
        f"When the murder happened, the murderer and {VICTIM} were in the same room with the "
        "murder weapon, and no other suspect "
        f"was there; other weapons may have been. Clues about where {VICTIM} was hold whether he "
        "was alive or dead. A clue that "
        "puts two suspects or two weapons into the same room speaks of two different ones."
    )
    return "\n\n".join(parts)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"• {line}" for line in lines)


def _board(scene: Scene) -> str:
    digits = len(str(len(scene.rooms)))
    rows = []
    for start in range(0, len(scene.rooms), scene.width):
        cells = [
            f"{r + 1:0{digits}d}" if r < len(scene.rooms) else "-" * digits
            for r in range(start, start + scene.width)
        ]
        rows.append("W " + "|".join(cells) + " E")
    edge = "  " + " ".join("{0}" * digits for _ in range(scene.width))
    return "\n".join([edge.format("N"), *rows, edge.format("S")])

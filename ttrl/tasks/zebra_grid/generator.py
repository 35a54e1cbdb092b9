"""Make zebra puzzles: houses in a row, attributes with a different value for each, and a minimal
set of clues for one solution.

Minimal: with all clues exactly one grid is possible; without any one of them, more than one. The
kinds of clues are those of ZebraLogic (Lin et al. 2025): found at a house, not at a house, same
house, directly left or right, side by side, somewhere to the left or right, one or two houses
between.
"""

import bisect
import random
from collections.abc import Collection
from typing import NamedTuple

from ttrl.errors import TaskError
from ttrl.tasks.clauses import Clauses
from ttrl.tasks.datasets import Row
from ttrl.tasks.words import in_validation, pick, shuffled

SMALLEST = 2
LARGEST = 6
"""Houses, and attributes."""


class Attribute(NamedTuple):
    """One column of the grid."""

    name: str
    """The column's heading."""
    sentence: str
    """The prompt's introduction of the values."""
    person: str
    """A clue's name for the holder of a value: "the person who keeps {}"."""
    values: tuple[str, ...]


def _attribute(name: str, sentence: str, person: str, values: str) -> Attribute:
    return Attribute(name, sentence, person, tuple(values.split()))


NAME = _attribute(
    "Name",
    "Everybody has a different name",
    "{}",
    "Anton Beatrice Cyril Dora Emil Flora Greta Hugo",
)
OTHERS = (
    _attribute(
        "Colour",
        "The houses have different colours",
        "the person in the {} house",
        "red green blue white yellow grey",
    ),
    _attribute(
        "Pet",
        "Everybody keeps a different animal",
        "the person who keeps the {}",
        "cat dog goat parrot tortoise pony",
    ),
    _attribute(
        "Drink",
        "Everybody likes a different drink",
        "the person who drinks {}",
        "tea coffee cocoa cider water lemonade",
    ),
    _attribute(
        "Dish",
        "Everybody cooks a different dish",
        "the person who cooks {}",
        "soup curry pasta stew omelette risotto",
    ),
    _attribute(
        "Hobby",
        "Everybody has a different hobby",
        "the person whose hobby is {}",
        "chess painting fishing pottery knitting archery",
    ),
    _attribute(
        "Flower",
        "A different flower grows at each door",
        "the person who grows {}",
        "roses tulips lilies asters dahlias irises",
    ),
    _attribute(
        "Vehicle",
        "Everybody drives something different",
        "the person with the {}",
        "van tractor scooter tandem convertible motorbike",
    ),
    _attribute(
        "Music",
        "Everybody listens to different music",
        "the person who listens to {}",
        "jazz opera folk blues techno swing",
    ),
    _attribute(
        "Birthplace",
        "Everybody was born in a different town",
        "the person from {}",
        "Lisbon Oslo Cairo Quito Hanoi Perth",
    ),
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
# The head start of "is in the third house" over relations in being left out.
_FACTS_FIRST = 0.5


class Value(NamedTuple):
    """A value by its attribute's number and its own: a row of variables, one for each house."""

    attribute: int
    number: int


class ZebraClue(NamedTuple):
    """A sentence, and the houses it allows."""

    text: str
    one: Value
    other: Value | None
    """None for a clue about one value."""
    allowed: Collection[int]
    """Distances from `one` to `other`, in houses to the right; for a clue about one value, its
    houses.
    """

    def allows(self, one: int, other: int) -> bool:
        """Return whether the clue is true with its values in these houses."""
        return (one if self.other is None else other - one) in self.allowed


class ZebraDraft(NamedTuple):
    """A puzzle in the making."""

    attributes: tuple[Attribute, ...]
    """With only the values in use."""
    houses: dict[Value, int]
    """The house of each value, from 0."""
    clues: tuple[ZebraClue, ...]


def make_puzzle(
    seed: int | str,
    houses: int | None = None,
    attributes: int | None = None,
    held_out: bool | None = None,
) -> Row:
    """Make a row in ZebraLogic's format: {"id", "size", "puzzle", "solution": {"header", "rows"}};
    the same every time.

    houses, attributes: 2 to 6; None draws one. The column of house numbers is not counted as an
        attribute.
    held_out: True makes one for validation, False one for training, None either. A hash of the
        attributes and their values, in the order of the text, decides: with any seeds, no puzzle is
        ever made for both.
    Raises TaskError for other sizes.
    """
    draft = make_draft(seed, houses, attributes, held_out)
    count = max(draft.houses.values()) + 1
    rows = [[str(house + 1)] for house in range(count)]
    for value, house in sorted(draft.houses.items()):
        rows[house].append(draft.attributes[value.attribute].values[value.number])
    return {
        "id": f"zebra-{count}x{len(draft.attributes)}-{seed}",
        "size": f"{count}*{len(draft.attributes)}",
        "puzzle": _text(draft, count),
        "solution": {
            "header": ["House", *(attribute.name for attribute in draft.attributes)],
            "rows": rows,
        },
    }


def make_draft(
    seed: int | str,
    houses: int | None = None,
    attributes: int | None = None,
    held_out: bool | None = None,
) -> ZebraDraft:
    """Make the puzzle of a seed, without its text."""
    for name, value in (("houses", houses), ("attributes", attributes)):
        if value is not None and (type(value) is not int or not SMALLEST <= value <= LARGEST):
            raise TaskError(
                f"zebra-grid: {name} is {value!r}; give a whole number from {SMALLEST} to {LARGEST}"
            )
    rng = random.Random(f"ttrl zebra grid 1 {seed}")
    sizes = range(SMALLEST, LARGEST + 1)
    if houses is None:
        houses = pick(rng, sizes)
    if attributes is None:
        attributes = pick(rng, sizes)
    while True:
        columns = [NAME, *shuffled(rng, OTHERS)[: attributes - 1]]
        chosen = tuple(
            column._replace(values=tuple(shuffled(rng, column.values)[:houses]))
            for column in columns
        )
        setting = "zebra-grid " + " ".join(value for column in chosen for value in column.values)
        if held_out is None or in_validation(setting) == held_out:
            break
    where = {
        Value(a, number): house
        for a in range(attributes)
        for number, house in enumerate(shuffled(rng, range(houses)))
    }
    return ZebraDraft(chosen, where, _minimal_clues(rng, chosen, where, houses))


def _minimal_clues(
    rng: random.Random, attributes: tuple[Attribute, ...], where: dict[Value, int], houses: int
) -> tuple[ZebraClue, ...]:
    """Draw all true clues in a random order; return the necessary ones of the first to leave one
    grid.
    """
    clauses = Clauses()
    at = {value: [clauses.new_variable() for _ in range(houses)] for value in where}
    for a in range(len(attributes)):
        for place in range(houses):
            clauses.add_exactly_one(at[Value(a, place)])
            clauses.add_exactly_one([at[Value(a, number)][place] for number in range(houses)])
    # From here on, any solution differs from the true grid.
    clauses.add([-at[value][house] for value, house in where.items()])
    clues = shuffled(rng, _true_clues(attributes, where, houses))
    switches = [clauses.new_variable() for _ in clues]
    for switch, clue in zip(switches, clues):
        for first in range(houses):
            if clue.other is None:
                others = []
            else:
                others = [
                    at[clue.other][second] for second in range(houses) if clue.allows(first, second)
                ]
            if clue.other is not None or not clue.allows(first, 0):
                clauses.add([-switch, -at[clue.one][first], *others])
    count = bisect.bisect_left(
        range(len(clues)), True, key=lambda count: clauses.contradict(switches[:count])
    )
    order = [rng.random() + (0.0 if clue.other is None else _FACTS_FIRST) for clue in clues[:count]]
    needed = clauses.needed([switch for _, switch in sorted(zip(order, switches))])
    return tuple(clue for switch, clue in zip(switches, clues) if switch in needed)


def _true_clues(
    attributes: tuple[Attribute, ...], where: dict[Value, int], houses: int
) -> list[ZebraClue]:
    """Return every possible clue: together they leave one grid, because each value's house is among
    them.
    """
    clues: list[ZebraClue] = []

    def person(value: Value) -> str:
        attribute = attributes[value.attribute]
        return attribute.person.format(attribute.values[value.number])

    def add(text: str, one: Value, other: Value | None, allowed: Collection[int]) -> None:
        clues.append(ZebraClue(text[:1].upper() + text[1:] + ".", one, other, allowed))

    for one, house in where.items():
        for h in range(houses):
            if h == house:
                add(f"{person(one)} is in the {_ORDINALS[h]} house", one, None, {h})
            else:
                add(
                    f"{person(one)} is not in the {_ORDINALS[h]} house",
                    one,
                    None,
                    {*range(houses)} - {h},
                )
        for other, another in where.items():
            if one == other:
                continue
            me = person(one)
            them = person(other)
            distance = another - house
            if distance == 0 and one < other:
                add(f"{me} is {them}", one, other, {0})
            elif distance > 0:
                add(f"{me} is somewhere to the left of {them}", one, other, range(1, houses))
                add(f"{them} is somewhere to the right of {me}", other, one, range(1 - houses, 0))
                if distance == 1:
                    add(f"{me} is directly left of {them}", one, other, {1})
                    add(f"{them} is directly right of {me}", other, one, {-1})
                    add(f"{me} and {them} are next to each other", one, other, {-1, 1})
                elif distance <= 3:
                    if distance == 2:
                        between = "There is one house"
                    else:
                        between = "There are two houses"
                    add(f"{between} between {me} and {them}", one, other, {-distance, distance})
    return clues


def _text(draft: ZebraDraft, houses: int) -> str:
    """Write the puzzle as ZebraLogic does: houses, attributes, numbered clues."""
    lines = [
        f"There are {houses} houses in a row, numbered 1 to {houses} from left to right. One "
        "person lives in each of them. "
        "Each attribute below has a different value in each house:",
        *(
            f" - {attribute.sentence}: " + ", ".join(f"`{x}`" for x in attribute.values)
            for attribute in draft.attributes
        ),
        "",
        "## Clues:",
        *(f"{number}. {clue.text}" for number, clue in enumerate(draft.clues, 1)),
    ]
    return "\n".join(lines)

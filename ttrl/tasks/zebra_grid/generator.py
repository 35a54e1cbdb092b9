"""Makes zebra puzzles: houses in a row, attributes of which each has another value, and a minimal set of clues for one solution.

Minimal: with all clues exactly one grid is possible; without any one of them, more than one. The kinds of clues are those of
ZebraLogic (Lin et al. 2025): found at a house, not at a house, same house, directly left or right, side by side, somewhere to the
left or right, one or two houses between.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ttrl.errors import TaskError
from ttrl.tasks.sat import Solver
from ttrl.tasks.words import in_validation, pick

SMALLEST, LARGEST = 2, 6
"""Houses, and attributes."""


class Attribute(NamedTuple):
    """One column of the grid."""

    name: str
    """The column's heading."""
    sentence: str
    """How the prompt introduces the values."""
    person: str
    """Who has a value: "the person who keeps {}"; a clue's subject."""
    values: tuple[str, ...]


def _attribute(name: str, sentence: str, person: str, values: str) -> Attribute:
    return Attribute(name, sentence, person, tuple(values.split()))


NAME = _attribute("Name", "Everybody has a different name", "{}", "Anton Beatrice Cyril Dora Emil Flora Greta Hugo")
OTHERS = (
    _attribute("Colour", "The houses have different colours", "the person in the {} house", "red green blue white yellow grey"),
    _attribute("Pet", "Everybody keeps a different animal", "the person who keeps the {}", "cat dog goat parrot tortoise pony"),
    _attribute("Drink", "Everybody likes a different drink", "the person who drinks {}", "tea coffee cocoa cider water lemonade"),
    _attribute("Dish", "Everybody cooks a different dish", "the person who cooks {}", "soup curry pasta stew omelette risotto"),
    _attribute(
        "Hobby",
        "Everybody has a different hobby",
        "the person whose hobby is {}",
        "chess painting fishing pottery knitting archery",
    ),
    _attribute(
        "Flower", "A different flower grows at each door", "the person who grows {}", "roses tulips lilies asters dahlias irises"
    ),
    _attribute(
        "Vehicle",
        "Everybody drives something different",
        "the person with the {}",
        "van tractor scooter tandem convertible motorbike",
    ),
    _attribute(
        "Music", "Everybody listens to different music", "the person who listens to {}", "jazz opera folk blues techno swing"
    ),
    _attribute(
        "Birthplace", "Everybody was born in a different town", "the person from {}", "Lisbon Oslo Cairo Quito Hanoi Perth"
    ),
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_FACTS_FIRST = 0.5  # how much earlier than relations it is tried to leave out "is in the third house"


class Value(NamedTuple):
    """A value by its attribute's number and its own: a row of variables, one for each house."""

    attribute: int
    number: int


class Clue(NamedTuple):
    """A sentence, and the pairs (house of one, house of the other) that it allows; for a clue about one value, the houses."""

    text: str
    one: Value
    other: Value | None
    allows: Callable[[int, int], bool]


class Draft(NamedTuple):
    """A puzzle in the making. `houses[value]` is where it is, from 0; attributes hold just the values that are used."""

    attributes: tuple[Attribute, ...]
    houses: dict[Value, int]
    clues: tuple[Clue, ...]


def make_puzzle(
    seed: int | str, houses: int | None = None, attributes: int | None = None, held_out: bool | None = None
) -> dict[str, Any]:
    """A row in ZebraLogic's format: {"id", "size", "puzzle", "solution": {"header", "rows"}}; the same for the same arguments.

    houses, attributes: 2 to 6; None draws one. The column of house numbers is not counted as an attribute.
    held_out: True makes one for validation, False one for training, None either. A hash of the attributes and their values, in
        the order of the text, decides: whatever the seeds, no puzzle is ever made for both.
    Raises TaskError for other sizes.
    """
    draft = make_draft(seed, houses, attributes, held_out)
    count = max(draft.houses.values()) + 1
    by_house = [
        [next(a.values[v.number] for v, house in draft.houses.items() if v.attribute == number and house == h)
         for number, a in enumerate(draft.attributes)]
        for h in range(count)
    ]  # fmt: skip
    return {
        "id": f"zebra-{count}x{len(draft.attributes)}-{seed}",
        "size": f"{count}*{len(draft.attributes)}",
        "puzzle": _text(draft, count),
        "solution": {
            "header": ["House", *(attribute.name for attribute in draft.attributes)],
            "rows": [[str(h + 1), *row] for h, row in enumerate(by_house)],
        },
    }


def make_draft(seed: int | str, houses: int | None = None, attributes: int | None = None, held_out: bool | None = None) -> Draft:
    """The puzzle of a seed before it is written out."""
    for name, value in (("houses", houses), ("attributes", attributes)):
        if value is not None and (type(value) is not int or not SMALLEST <= value <= LARGEST):
            raise TaskError(f"zebra-grid: {name} is {value!r}; give a whole number from {SMALLEST} to {LARGEST}")
    rng = random.Random(f"ttrl zebra grid 1 {seed}")
    sizes = range(SMALLEST, LARGEST + 1)
    houses = pick(rng, sizes) if houses is None else houses
    attributes = pick(rng, sizes) if attributes is None else attributes
    while True:
        columns = [NAME, *_shuffled(rng, OTHERS)[: attributes - 1]]
        chosen = tuple(column._replace(values=tuple(_shuffled(rng, column.values)[:houses])) for column in columns)
        setting = "zebra-grid " + " ".join(value for column in chosen for value in column.values)
        if held_out is None or in_validation(setting) == held_out:
            break
    where = {Value(a, number): house for a in range(attributes) for number, house in enumerate(_shuffled(rng, range(houses)))}
    return Draft(chosen, where, _minimal_clues(rng, chosen, where, houses))


def _shuffled(rng: random.Random, items: Sequence[Any]) -> list[Any]:
    """A random order that is the same in every version of Python: only `random()` is drawn from."""
    left, result = list(items), []
    while left:
        result.append(left.pop(int(rng.random() * len(left))))
    return result


def _minimal_clues(
    rng: random.Random, attributes: tuple[Attribute, ...], where: dict[Value, int], houses: int
) -> tuple[Clue, ...]:
    """All true clues in a random order; the first of them that leave one grid; without those that are not needed."""
    solver = Solver()
    at = {value: [solver.new_variable(house == h) for h in range(houses)] for value, house in where.items()}
    for a in range(len(attributes)):
        for place in range(houses):
            solver.add_exactly_one(at[Value(a, place)])
            solver.add_exactly_one([at[Value(a, number)][place] for number in range(houses)])
    solver.add([-at[value][house] for value, house in where.items()])  # from here on, a solution is another grid
    clues = [clue for clue in _shuffled(rng, _true_clues(attributes, where, houses)) if clue is not None]
    switches = []
    for clue in clues:
        switches.append(switch := solver.new_variable(True))
        for first in range(houses):
            if clue.other is None:
                if not clue.allows(first, 0):
                    solver.add([-switch, -at[clue.one][first]])
            else:
                solver.add([-switch, -at[clue.one][first], *(
                    at[clue.other][second] for second in range(houses) if clue.allows(first, second)
                )])  # fmt: skip
    low, high = 0, len(clues)
    while low < high:
        middle = (low + high) // 2
        if solver.solve(switches[:middle]):
            low = middle + 1
        else:
            high = middle
    left = list(range(high))
    order = {number: rng.random() + (0.0 if clues[number].other is None else _FACTS_FIRST) for number in left}
    needed = []
    for number in sorted(left, key=order.__getitem__):
        left.remove(number)
        if solver.solve([switches[other] for other in left]):
            solver.add([switches[number]])
            needed.append(number)
        else:
            solver.add([-switches[number]])
    return tuple(clues[number] for number in sorted(needed))


def _true_clues(attributes: tuple[Attribute, ...], where: dict[Value, int], houses: int) -> list[Clue]:
    """Every clue that could be given: together they leave one grid, for each value's house is among them."""

    def person(value: Value) -> str:
        attribute = attributes[value.attribute]
        return attribute.person.format(attribute.values[value.number])

    def clue(text: str, one: Value, other: Value | None, allows: Callable[[int, int], bool]) -> Clue:
        return Clue(text[:1].upper() + text[1:] + ".", one, other, allows)

    clues = []
    for one, house in where.items():
        for h in range(houses):
            if h == house:
                clues.append(clue(f"{person(one)} is in the {_ORDINALS[h]} house", one, None, lambda x, _, h=h: x == h))
            else:
                clues.append(clue(f"{person(one)} is not in the {_ORDINALS[h]} house", one, None, lambda x, _, h=h: x != h))
        for other, another in where.items():
            if one == other:
                continue
            me, them, distance = person(one), person(other), another - house
            if distance == 0 and one < other:
                clues.append(clue(f"{me} is {them}", one, other, lambda x, y: x == y))
            elif distance > 0:
                clues.append(clue(f"{me} is somewhere to the left of {them}", one, other, lambda x, y: x < y))
                clues.append(clue(f"{them} is somewhere to the right of {me}", other, one, lambda x, y: x > y))
                if distance == 1:
                    clues.append(clue(f"{me} is directly left of {them}", one, other, lambda x, y: y - x == 1))
                    clues.append(clue(f"{them} is directly right of {me}", other, one, lambda x, y: x - y == 1))
                    clues.append(clue(f"{me} and {them} are next to each other", one, other, lambda x, y: abs(x - y) == 1))
                elif distance <= 3:
                    between = "There is one house" if distance == 2 else "There are two houses"
                    text = f"{between} between {me} and {them}"
                    clues.append(clue(text, one, other, lambda x, y, d=distance: abs(x - y) == d))
    return clues


def _text(draft: Draft, houses: int) -> str:
    """The puzzle as ZebraLogic writes it: houses, attributes, numbered clues."""
    lines = [
        f"There are {houses} houses in a row, numbered 1 to {houses} from left to right. One person lives in each of them. "
        "Each attribute below has a different value in each house:",
        *(f" - {attribute.sentence}: " + ", ".join(f"`{x}`" for x in attribute.values) for attribute in draft.attributes),
        "",
        "## Clues:",
        *(f"{number}. {clue.text}" for number, clue in enumerate(draft.clues, 1)),
    ]
    return "\n".join(lines)

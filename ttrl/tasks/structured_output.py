"""Structured output: the content of a sentence as a JSON object with given keys. Generated; easy to
check, and a small chat model without training for it succeeds now and then.

Held out are whole names, by a hash: texts of the validation and training splits share no person.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import after_thinking, reply_text
from ttrl.tasks.datasets import check_count, check_name, check_share
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import comparable, in_validation, pick

LONGEST = 2000
"""Limit on the characters read of a reply."""
_TRIES = 100_000  # to find another held-out text


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words(
    "Ada Adam Agnes Ahmed Aiko Akira Albert Alice Amina Andre Anita Anna Arjun Arthur Astrid "
    "Beatriz Ben Bianca Boris Bruno "
    "Camila Carl Carmen Chen Chloe Clara Daniel Daria David Deniz Diego Dora Edith Elena Elias "
    "Elif Emil Emma Erik Esther Eva "
    "Farah Felix Fiona Frank Freya Gita Grace Greta Gustav Hana Hassan Heidi Hugo Ida Igor Ines "
    "Ingrid Ivan Jack Jamal Jana "
    "Jonas Julia Kai Karin Kenji Kira Lars Laura Leila Leo Lina Louis Lucia Luis Maja Marco "
    "Maria Mateo Maya Mei Milan Mina "
    "Nadia Naomi Nils Nina Noah Olga Omar Oscar Paula Pedro Petra Priya Rafael Rania Rita Rosa "
    "Ruth Samir Sara Sofia Stefan "
    "Tariq Tessa Theo Tomas Uma Vera Victor Wanda Yara Yusuf Zoe"
)
# Keys with values of one kind: a small model hardly ever fills in a bare "item" rightly, so nothing
# rewards it for doing so.
_POOLS: dict[str, Sequence[str | int]] = {
    "age": range(18, 91),
    "city": _words(
        "Athens Bergen Berlin Bilbao Boston Cairo Cork Dakar Delhi Denver Dublin Geneva Ghent "
        "Hanoi Kyoto Lima Lisbon Lyon "
        "Madrid Milan Mumbai Nairobi Naples Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia "
        "Sydney Tunis Turin Vienna"
    ),
    "fruit": _words(
        "apples bananas cherries figs grapes lemons limes mangoes melons olives oranges peaches "
        "pears plums"
    ),
    "instrument": _words(
        "banjo cello clarinet drum flute guitar harp piano trombone trumpet ukulele viola violin"
    ),
    "quantity": range(2, 40),
    "nights": range(2, 15),
    "weight": range(2, 60),
    "price": range(5, 400),
}
_TEXTS: dict[str, tuple[str, ...]] = {
    "name age city": (
        "{name} is {age} years old and lives in {city}.",
        "{name} moved to {city} last spring, at the age of {age}.",
        "In {city} I met {name}, who had just turned {age}.",
    ),
    "customer fruit quantity": (
        "{customer} ordered {quantity} {fruit} this morning.",
        "Please send {quantity} {fruit} to {customer} by Friday.",
        "We packed {quantity} of the {fruit} for {customer}.",
    ),
    "guest city nights": (
        "{guest} will stay in {city} for {nights} nights.",
        "A room in {city}, {nights} nights, was booked by {guest}.",
        "For {nights} nights {guest} needs a hotel in {city}.",
    ),
    "sender city weight": (
        "{sender} sent a parcel of {weight} kilos to {city}.",
        "The parcel to {city} weighs {weight} kilos and comes from {sender}.",
        "{sender} wants {weight} kilos delivered to {city}.",
    ),
    "buyer instrument price": (
        "{buyer} paid {price} dollars for the {instrument}.",
        "The {instrument} went to {buyer} for {price} dollars.",
        "{buyer} bought a {instrument} for {price} dollars.",
    ),
}
_PROMPT = "{text}\n\nWrite this as JSON with the keys {keys}."


@dataclass(frozen=True)
class StructuredOutputGrader:
    """1.0 if the reply, after any thinking, is one JSON object with exactly these keys and values;
    else `valid_reward` for an object, and half of the rest in proportion to the right keys, of all
    keys present or expected.

    That half reads leniently, to pay for right content in any place. When only bare objects paid,
    two keys of a bare one were worth more than all three in a code block, and a policy stayed
    content with two.

    lenient: the object may stand between other words or in a code block, numbers may be texts, and
        case does not count.
    """

    expected: Mapping[str, str | int]
    valid_reward: float = 0.1
    lenient: bool = False

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1, "valid": 1 if there is an object}), and unless
        `lenient`, the lenient verdict ("lenient")."""
        text = after_thinking(reply_text(choice))
        share = self._share(text, self.lenient)
        said = self._share(text, True)
        metrics = {"exact": float(share == 1), "valid": float(share is not None)}
        if not self.lenient:
            metrics["lenient"] = float(said == 1)
        if share == 1:
            return 1.0, metrics
        return metrics["valid"] * self.valid_reward + (1 - self.valid_reward) / 2 * (
            said or 0.0
        ), metrics

    def _share(self, text: str, lenient: bool) -> float | None:
        """Return the share of right keys; None without an object."""
        found = read_object(text, anywhere=lenient)
        if found is None:
            return None
        right = sum(
            key in found and _is_same(found[key], value, lenient)
            for key, value in self.expected.items()
        )
        return right / len({**self.expected, **found})

    def reference(self) -> str:
        return json.dumps(dict(self.expected))


def _is_same(found: object, expected: str | int, lenient: bool) -> bool:
    if lenient and isinstance(found, str | int) and not isinstance(found, bool):
        return comparable(str(found)) == comparable(str(expected))
    return type(found) is type(expected) and found == expected


def read_object(text: str, *, anywhere: bool = False) -> Mapping[str, Any] | None:
    """Return a reply's JSON object; with `anywhere`, from its first "{" to its last "}". None
    without one, for one with a key twice, and beyond LONGEST characters."""
    text = text.strip()
    if anywhere:
        text = text[text.find("{") : text.rfind("}") + 1]
    if len(text) > LONGEST:
        return None
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        return found
    return None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and the infinities are not JSON


def get_structured_output_tasks(
    split: Literal["train", "validation"] = "train",
    n: int = 32,
    seed: int = 0,
    *,
    valid_reward: float = 0.1,
    lenient: bool = False,
) -> list[Task]:
    """Return `n` sentences with three facts each, to be written as JSON. valid_reward, lenient: see
    `StructuredOutputGrader`.

    train: the seed decides. validation: the same for every seed, no two alike; a larger `n` begins
    with the same ones. Raises TaskError for impossible settings.
    """
    check_name("split", split, ("train", "validation"), "structured_output")
    check_count(n)
    check_share("valid_reward", valid_reward, below_one=True)
    held_out = split == "validation"
    names = [name for name in _NAMES if in_validation(f"structured_output {name}") == held_out]
    rng = random.Random(f"structured_output {split} {'' if held_out else seed}")
    tasks: dict[str, Task] = {}
    for _ in range(n if not held_out else min(20 * n + 1000, _TRIES)):
        keys = pick(rng, list(_TEXTS)).split()
        facts = {key: pick(rng, _POOLS.get(key, names)) for key in keys}
        text = pick(rng, _TEXTS[" ".join(keys)]).format(**facts)
        if held_out and text in tasks:
            continue
        content = _PROMPT.format(text=text, keys=f'"{keys[0]}", "{keys[1]}" and "{keys[2]}"')
        name = "structured_output/" + "-".join(map(str, facts.values()))
        task = Task(
            question(content), StructuredOutputGrader(facts, valid_reward, lenient), id=name
        )
        tasks[text if held_out else str(len(tasks))] = task
        if len(tasks) == n:
            return list(tasks.values())
    raise TaskError(f"{n} {split} tasks of structured_output: found {len(tasks)}; ask for fewer")

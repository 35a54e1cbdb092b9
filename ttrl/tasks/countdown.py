"""Countdown: reach a target from given numbers with + - × ÷. Easy to check, hard to guess; the task of TinyZero and of the
television game. Puzzles are generated, with a solution each.

Held out are whole sets of numbers, by a hash: no training puzzle, whatever its seed, has the numbers of a validation puzzle.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import after_thinking, ascii_digits, find_boxed, find_tagged, latest, reply_text
from ttrl.tasks.datasets import check_count, check_name, check_share
from ttrl.tasks.task import Task
from ttrl.tasks.words import in_validation, pick

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

LONGEST = 300
"""Characters of an expression."""
DEEPEST = 40
"""Parentheses inside each other: the parser calls itself for each, and Python allows no more than 1000 calls in all."""
_PROMPT = (
    "Use each of the numbers {numbers} exactly once, with + - * / and parentheses, to make {target}. You may think first. "
    "End your reply with the expression in <answer> </answer> tags, such as <answer>(1 + 2) * 3</answer>."
)
_OPERATORS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∶": "/", "[": "(", "]": ")", "{": "(", "}": ")"})


@dataclass(frozen=True)
class CountdownGrader:
    r"""1.0 if the reply's expression uses the numbers, each as often as it is given, and has the target for its value.

    The expression is what stands in the last `<answer>` tags or the last `\boxed{}`, after any thinking; where there is
    neither, the last line. `= target` may stand behind it. valid_reward: for an expression of the right numbers with another
    value.
    """

    numbers: tuple[int, ...]
    target: int
    solution: str
    valid_reward: float = 0.0

    def __call__(self, choice: "Choice") -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1, "valid": 1 if it is an expression of the right numbers})."""
        read = evaluate(read_expression(reply_text(choice)))
        valid = read is not None and sorted(read[1]) == sorted(self.numbers)
        exact = valid and read is not None and read[0] == self.target and read[2] in (None, self.target)
        return 1.0 if exact else self.valid_reward * valid, {"exact": float(exact), "valid": float(valid)}

    def reference(self) -> str:
        """Return a reply that earns 1.0."""
        return f"<answer>{self.solution}</answer>"


def read_expression(text: str) -> str:
    """Return what a reply gives as its answer, with ASCII signs."""
    text = after_thinking(text)
    part = latest(text, find_tagged(text), find_boxed(text))
    if part is not None:
        part = part if len(part) <= 2 * LONGEST else ""
    else:
        text = text.rstrip()
        part = text[max(text.rfind("\n") + 1, len(text) - 2 * LONGEST) :]
    part = part.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/").replace("\\left", "").replace("\\right", "")
    part = part.replace("\\(", "").replace("\\)", "").replace("\\[", "").replace("\\]", "")
    part = ascii_digits(part).translate(_OPERATORS).strip(" \t\r\n`$.")
    bold = next((mark for mark in ("**", "__") if part.startswith(mark) and part.endswith(mark)), "")
    return part.removeprefix(bold).removesuffix(bold)


def evaluate(expression: str) -> tuple[Fraction, list[int], Fraction | None] | None:
    """Evaluate whole numbers with + - * / and parentheses: (value, numbers used, what stands after "=" or None).

    Exact, and safe: a parser of its own, which knows nothing else. None for everything that is no such expression, for
    divisions by zero, and beyond LONGEST characters. A sign before a parenthesis or number ("-3") is allowed.
    """
    left, equals, right = expression.partition("=")
    try:
        tokens = list(_tokens(left))
        values = [token for token in tokens if isinstance(token, int)]
        value = _Parser(tokens).parse()
        claimed = _Parser(list(_tokens(right))).parse() if equals else None
    except (_SyntaxError, ZeroDivisionError):
        return None
    return value, values, claimed


class _SyntaxError(Exception):
    pass


def _tokens(text: str) -> Iterator[int | str]:
    if len(text) > LONGEST:
        raise _SyntaxError
    place = depth = 0
    while place < len(text):
        character = text[place]
        if character in "0123456789":
            end = place
            while end < len(text) and text[end] in "0123456789":
                end += 1
            if end - place > 9:
                raise _SyntaxError
            yield int(text[place:end])
            place = end
            continue
        if character in "+-*/()":
            depth += (character == "(") - (character == ")")
            if depth > DEEPEST:
                raise _SyntaxError
            yield character
        elif not character.isspace():
            raise _SyntaxError
        place += 1


class _Parser:
    """Recursive descent; DEEPEST bounds its depth."""

    def __init__(self, tokens: list[int | str]) -> None:
        self.tokens, self.place = tokens, 0

    def parse(self) -> Fraction:
        value = self.sum()
        if self.place < len(self.tokens):
            raise _SyntaxError
        return value

    def take(self, *wanted: str) -> str | None:
        if self.place < len(self.tokens) and self.tokens[self.place] in wanted:
            self.place += 1
            return str(self.tokens[self.place - 1])
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while operator := self.take("+", "-"):
            value = value + self.product() if operator == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while operator := self.take("*", "/"):
            value = value * self.atom() if operator == "*" else value / self.atom()
        return value

    def atom(self) -> Fraction:
        sign = 1
        while operator := self.take("+", "-"):
            sign = -sign if operator == "-" else sign
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise _SyntaxError
            return sign * value
        if self.place < len(self.tokens) and isinstance(self.tokens[self.place], int):
            self.place += 1
            return Fraction(sign * int(self.tokens[self.place - 1]))
        raise _SyntaxError


def get_countdown_tasks(
    split: Literal["train", "validation"] = "train",
    n: int = 32,
    seed: int = 0,
    *,
    min_numbers: int = 3,
    max_numbers: int = 4,
    largest: int = 99,
    largest_target: int = 999,
    valid_reward: float = 0.0,
) -> list[Task]:
    """Return `n` puzzles of min_numbers to max_numbers (2 to 8) whole numbers up to `largest`, targets up to largest_target.

    train: the seed decides. validation: the same for every seed, no two with the same numbers and target; more of them begin
    with the same ones. Raises TaskError for impossible settings.
    """
    check_name("split", split, ("train", "validation"), "countdown")
    check_count(n)
    if not 2 <= min_numbers <= max_numbers <= 8:
        raise TaskError(f"min_numbers {min_numbers} and max_numbers {max_numbers}: 2 <= min_numbers <= max_numbers <= 8")
    if largest < 10 or largest_target < 10:
        raise TaskError(f"largest {largest} and largest_target {largest_target}: give 10 or more for both")
    check_share("valid_reward", valid_reward, below_one=True)
    held_out = split == "validation"
    settings = f"{min_numbers} {max_numbers} {largest} {largest_target}"
    rng = random.Random(f"countdown {split} {settings} {'' if held_out else seed}")
    tasks: dict[str, Task] = {}
    for _ in range(200 * n + 5000):
        numbers, solution, target = _draw(rng, min_numbers + int(rng.random() * (max_numbers - min_numbers + 1)), largest)
        if not 1 <= target <= largest_target or target in numbers:
            continue
        if in_validation("countdown " + " ".join(map(str, sorted(numbers)))) != held_out:
            continue
        name = f"countdown/{'-'.join(map(str, numbers))}/{target}"
        if held_out and name in tasks:
            continue
        content = _PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
        grader = CountdownGrader(tuple(numbers), int(target), solution, valid_reward)
        tasks[name if held_out else str(len(tasks))] = Task([{"role": "user", "content": content}], grader, id=name)
        if len(tasks) == n:
            return list(tasks.values())
    raise TaskError(f"{n} {split} tasks of countdown: found {len(tasks)}; ask for fewer, or for larger numbers")


def _draw(rng: random.Random, count: int, largest: int) -> tuple[list[int], str, Fraction]:
    """Draw (numbers in an order that gives nothing away, an expression of them, its value, which may be any)."""
    numbers = [1 + int(rng.random() * largest) for _ in range(count)]
    terms = [(Fraction(number), str(number)) for number in numbers]
    while len(terms) > 1:
        first, second = (terms.pop(int(rng.random() * len(terms))) for _ in range(2))
        operators = "+-*/" if second[0] != 0 and (first[0] / second[0]).denominator == 1 else "+-*"
        operator = pick(rng, operators)
        a, b = first[0], second[0]
        value = a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b
        terms.append((value, f"({first[1]} {operator} {second[1]})"))
    value, text = terms[0]
    return numbers, text[1:-1], value

"""Countdown: reach a target from given numbers with + - × ÷. Easy to check, hard to guess; the task
of TinyZero and of the television game. Puzzles are generated, with a solution each.

Held out are whole sets of numbers, by a hash: no training puzzle, with any seed, has the numbers of
a validation puzzle.
"""

import ast
import itertools
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import after_thinking, find_boxed, find_tagged, latest, reply_text
from ttrl.tasks.datasets import (
    check_count,
    check_name,
    check_share,
    check_span,
    check_whole,
)
from ttrl.tasks.numerals import ascii_digits, by_replacement
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import as_typed, in_validation, pick

LONGEST = 300
"""Limit on the characters of an expression."""
DEEPEST = 40
"""Limit on nested parentheses; Python's parser has one, too."""
_PROMPT = (
    "Use each of the numbers {numbers} exactly once, with + - * / and parentheses, to make "
    "{target}. You may think first. "
    "End your reply with the expression in <answer> </answer> tags, such as <answer>(1 + 2) * "
    "3</answer>."
)
_OPERATORS = by_replacement({"*": "×·⋅∗", "/": "÷∶", "(": "[{", ")": "]}"})
_MACROS = {"*": r"\times \cdot", "/": r"\div", "": r"\left \right \( \) \[ \]"}
_LARGEST = 10**15
"""Numbers are drawn as parts of a float."""
_ALLOWED = re.compile(r"[0-9+*/() -]+")
_DIGITS = re.compile(r"[0-9]+")
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_BY_SIGN = dict(zip("+-*/", _OPERATIONS.values(), strict=True))


@dataclass(frozen=True)
class CountdownGrader:
    r"""1.0 if the reply's expression uses the numbers, each as often as it is given, and has the
    target for its value.

    The expression is the content of the last `<answer>` tags or the last `\boxed{}`, after any
    thinking; without either, the last line. `= target` may follow it. valid_reward: for an
    expression of the right numbers with another value.
    """

    numbers: tuple[int, ...]
    target: int
    solution: str
    valid_reward: float = 0.0

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1, "valid": 1 if it is an expression of the right
        numbers}).
        """
        read = evaluate(read_expression(reply_text(choice)))
        valid = read is not None and sorted(read[1]) == sorted(self.numbers)
        exact = (
            valid and read is not None and read[0] == self.target and read[2] in (None, self.target)
        )
        return 1.0 if exact else self.valid_reward * valid, {
            "exact": float(exact),
            "valid": float(valid),
        }

    def reference(self) -> str:
        return f"<answer>{self.solution}</answer>"


def read_expression(text: str) -> str:
    """Return a reply's answer, with ASCII signs."""
    text = after_thinking(text)
    part = latest(text, find_tagged(text), find_boxed(text))
    if part is not None:
        part = part if len(part) <= 2 * LONGEST else ""
    else:
        text = text.rstrip()
        part = text[max(text.rfind("\n") + 1, len(text) - 2 * LONGEST) :]
    for sign, macros in _MACROS.items():
        for macro in macros.split():
            part = part.replace(macro, sign)
    part = ascii_digits(as_typed(part)).translate(_OPERATORS).strip(" \t\r\n`$.")
    bold = next(
        (mark for mark in ("**", "__") if part.startswith(mark) and part.endswith(mark)), ""
    )
    return part.removeprefix(bold).removesuffix(bold)


def evaluate(expression: str) -> tuple[Fraction, list[int], Fraction | None] | None:
    """Evaluate whole numbers with + - * / and parentheses: (value, numbers used, text after "=" or
    None).

    Exact, and safe: of Python's own syntax tree, nothing else is evaluated. None for anything else,
    for divisions by zero, and beyond LONGEST characters. A sign before a parenthesis or number
    ("-3") is allowed.
    """
    left, equals, right = expression.partition("=")
    try:
        return (
            _value(_tree(left)),
            list(map(int, _DIGITS.findall(left))),
            _value(_tree(right)) if equals else None,
        )
    except (SyntaxError, ZeroDivisionError):
        return None


def _tree(text: str) -> ast.expr:
    """Parse one side of an expression. Raises SyntaxError."""
    if len(text) <= LONGEST:
        text = " ".join(text.split())
    else:
        text = ""
    depths = itertools.accumulate((character == "(") - (character == ")") for character in text)
    if (
        not _ALLOWED.fullmatch(text)
        or max(depths, default=0) > DEEPEST
        or max(map(len, _DIGITS.findall(text)), default=0) > 9
    ):
        raise SyntaxError(text)
    # Python refuses 007.
    return ast.parse(_DIGITS.sub(lambda digits: str(int(digits[0])), text), mode="eval").body


def _value(tree: ast.expr) -> Fraction:
    if isinstance(tree, ast.Constant):
        return Fraction(tree.value)  # type: ignore[arg-type]  # _ALLOWED has only whole numbers
    if isinstance(tree, ast.UnaryOp):
        if isinstance(tree.op, ast.USub):
            return -_value(tree.operand)
        return _value(tree.operand)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATIONS:
        return _OPERATIONS[type(tree.op)](_value(tree.left), _value(tree.right))
    raise SyntaxError(ast.dump(tree)[:80])  # a power, a call, a tuple


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
    """Return `n` puzzles of min_numbers to max_numbers (2 to 8) whole numbers up to `largest`,
    targets up to largest_target.

    train: the seed decides. validation: the same for every seed, no two with the same numbers and
    target; a larger `n` begins with the same ones. Raises TaskError for impossible settings.
    """
    check_name("split", split, ("train", "validation"), "countdown")
    check_count(n)
    check_span("numbers", min_numbers, max_numbers, 2, 8)
    check_whole("largest", largest, 10, _LARGEST)
    check_whole("largest_target", largest_target, 10)
    check_share("valid_reward", valid_reward, below_one=True)
    held_out = split == "validation"
    settings = f"{min_numbers} {max_numbers} {largest} {largest_target}"
    rng = random.Random(f"countdown {split} {settings} {'' if held_out else seed}")
    tasks: dict[str, Task] = {}
    for _ in range(200 * n + 5000):
        numbers, solution, target = _draw(
            rng, min_numbers + int(rng.random() * (max_numbers - min_numbers + 1)), largest
        )
        if not 1 <= target <= largest_target or target in numbers:
            continue
        if in_validation("countdown " + " ".join(map(str, sorted(numbers)))) != held_out:
            continue
        name = f"countdown/{'-'.join(map(str, numbers))}/{target}"
        if held_out and name in tasks:
            continue
        content = _PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
        grader = CountdownGrader(tuple(numbers), int(target), solution, valid_reward)
        tasks[name if held_out else str(len(tasks))] = Task(question(content), grader, id=name)
        if len(tasks) == n:
            return list(tasks.values())
    raise TaskError(
        f"{n} {split} tasks of countdown: found {len(tasks)}; ask for fewer, or for larger numbers"
    )


def _draw(rng: random.Random, count: int, largest: int) -> tuple[list[int], str, Fraction]:
    """Draw (numbers in an uninformative order, an expression of them, its unrestricted value)."""
    numbers = [1 + int(rng.random() * largest) for _ in range(count)]
    terms = [(Fraction(number), str(number)) for number in numbers]
    while len(terms) > 1:
        first, second = (terms.pop(int(rng.random() * len(terms))) for _ in range(2))
        if second[0] != 0 and (first[0] / second[0]).denominator == 1:
            signs = "+-*/"
        else:
            signs = "+-*"
        sign = pick(rng, signs)
        value = _BY_SIGN[sign](first[0], second[0])
        terms.append((value, f"({first[1]} {sign} {second[1]})"))
    value, text = terms[0]
    return numbers, text[1:-1], value

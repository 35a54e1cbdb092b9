"""Make tasks of reasoning-gym (Open-Thought, Apache-2.0; pip install reasoning-gym): a hundred
families of generated puzzles, with verifiers.

The family's own verifier scores the answer in the reply's last `<answer>` tags, after any thinking,
with two restrictions:

- Only full marks count, unless `partial` is set. The package's default verifier pays for every
  answer that *contains* the right one, in proportion: "yes or no" earns a third of "yes". That
  part is never paid.
- Some verifiers evaluate the answer as Python (`eval`, or SymPy's parser, equally unsafe). They
  get only literals, or arithmetic of a size SymPy can handle.

Whole questions are held out, by a hash.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ttrl.agents.gym import first_seed
from ttrl.errors import TaskError, describe
from ttrl.tasks.answers import after_thinking, find_tagged, last_line, latest, reply_text
from ttrl.tasks.datasets import check_count, check_name
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import in_validation

REFUSED = {
    "composite": "it mixes other families; use those",
    "game_of_life_halting": ("its verifier accepts every answer (0.1.25: bool('False') is True)"),
    "codeio": (
        "it runs programs of a data file in this process; some of them print, and results differ "
        "between processes"
    ),
    "list_functions": (
        "it draws from Python's global random numbers, so no seed fixes its puzzles (0.1.25)"
    ),
    "propositional_logic": ("every second conclusion of another puzzle is right, too (0.1.25)"),
    "puzzle24": "its verifier does not check that the answer uses the given numbers (0.1.25)",
    "intermediate_integration": "SymPy needs minutes for some of its integrals",
}
"""Refused families, with the reason."""
UNSTEADY = frozenset(
    ["isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"]
)
"""Families dependent on the order of Python's sets (0.1.25). It differs by process unless
PYTHONHASHSEED is set: a continued run would not find its tasks again.
"""
LONGEST = 20_000
"""Characters of an answer."""
_ASK = (
    "\n\nThink as long as you like. End your reply with the answer, and nothing else, in "
    "<answer> </answer> tags."
)
_EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")
"""Keys of a right answer in the metadata, for families with several right answers."""
# fmt: off
_FUNCTIONS = frozenset([
    "sqrt", "exp", "log", "ln", "Abs", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
])
# fmt: on
_WORDS = re.compile(r"[\w\s,'\"-]*")
_MAX_BITS = 4096
"""Limit for the numbers and powers in an expression."""


@dataclasses.dataclass(frozen=True)
class ReasoningGymGrader:
    """Grade an answer 1.0 for full marks of the family's verifier.

    entry: the package's own (question, answer, metadata).
    options: the family's options, as JSON.
    partial: pay the verifier's mark, less its pay for containing the answer.
    """

    family: str
    options: str
    entry: Mapping[str, Any] = dataclasses.field(repr=False)
    partial: bool = False

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics): `exact`, `answered` (there are tags), `lenient` (without tags,
        grades the last line).
        """
        text = after_thinking(reply_text(choice))
        answer = latest(text, find_tagged(text))
        if answer is not None:
            score = self.score(answer)
            best = score
        else:
            score = 0.0
            best = self.score(last_line(text))
        exact = float(score >= 1.0)
        return score if self.partial else exact, {
            "exact": exact,
            "answered": float(answer is not None),
            "lenient": float(best >= 1.0),
        }

    def score(self, answer: str) -> float:
        """Return the verifier's mark for an answer, 0 to 1; 0 if it is unreadable or unsafe to
        evaluate.
        """
        answer = answer.strip()
        dataset = _dataset(self.family, self.options, 0, 1)
        if not answer or len(answer) > LONGEST or not _gate(dataset.score_answer.__func__)(answer):
            return 0.0
        try:
            score = min(1.0, max(0.0, float(dataset.score_answer(answer, self.entry))))
        except Exception:  # noqa: BLE001
            # Whatever a verifier raises on a model's answer, the answer is wrong.
            return 0.0
        right = str(self.entry["answer"])
        if score < 1.0 and right in answer and score == len(right) / len(answer):
            return 0.0
        return score

    @property
    def expected(self) -> str | None:
        """Return a right answer; None if the package has none."""
        metadata = self.entry["metadata"]
        answers = (self.entry["answer"], *(metadata.get(name) for name in _EXAMPLES))
        found = next((answer for answer in answers if answer is not None), None)
        if found is None or isinstance(found, str):
            return found
        return json.dumps(found)

    def reference(self) -> str:
        return f"<answer>{self.expected}</answer>"


def get_reasoning_gym_tasks(
    name: str,
    split: Literal["train", "validation"] = "train",
    n: int = 32,
    seed: int = 0,
    *,
    level: int | None = None,
    partial: bool = False,
    **options: Any,
) -> list[Task]:
    """Return `n` tasks of a family of reasoning-gym, such as "chain_sum".

    level: of the package's curriculum, from 0; sets all of the family's difficulties.
    options: fields of the family's config (`max_terms=3`); they override `level`.
    partial: pay for partly right answers, by the family's verifier.
    train: drawn by the seed. validation: the same for every seed, without repeated questions; a
        larger `n` begins with the same ones.

    Raises TaskError for unknown families and options, and for options refused by the family.
    """
    check_name("split", split, ("train", "validation"), "reasoning_gym")
    check_count(n)
    family = name.replace("-", "_")
    text = _options(family, level, options)
    held_out = split == "validation"
    first = first_seed(f"{family} {split} {'' if held_out else seed}")
    tasks: dict[str, Task] = {}
    failure: Exception | None = None
    dataset = _dataset(family, text, first, 200 * n + 2000)
    for number in range(20 * n + 400):
        try:
            entry = dataset[number]
        except Exception as error:  # noqa: BLE001
            # Generators fail for some seeds; skip these.
            failure = error
            continue
        asked = str(entry["question"])
        # Half of them, as some take seconds to make.
        if in_validation(f"{family} {asked}", 2) != held_out:
            continue
        digest = hashlib.sha256(asked.encode()).hexdigest()[:12]
        grader = ReasoningGymGrader(family, text, entry, partial)
        tasks.setdefault(
            digest if held_out else str(len(tasks)),
            Task(question(asked + _ASK), grader, id=f"reasoning_gym/{family}/{digest}"),
        )
        if len(tasks) == n:
            return list(tasks.values())
    if failure is not None:
        why = f"; the last failure: {describe(failure)}"
    else:
        why = ""
    raise TaskError(
        f"{n} {split} tasks of reasoning_gym:{family}: found only {len(tasks)} different ones; ask "
        f"for fewer{why}"
    )


def families() -> list[str]:
    """Return the names of all usable families. Raises TaskError without the package."""
    return sorted(set(_package().factory.DATASETS) - set(REFUSED))


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError(
            "tasks of reasoning_gym need the package reasoning-gym: pip install 'ttrl[tasks]' "
            f"({error})"
        ) from None
    return reasoning_gym


def _options(family: str, level: int | None, options: Mapping[str, Any]) -> str:
    """Return the family's options, as JSON. Raises TaskError."""
    factory = _package().factory
    if family in REFUSED:
        raise TaskError(f"reasoning_gym:{family} is refused: {REFUSED[family]}")
    check_name("name", family, families(), "reasoning_gym")
    if family in UNSTEADY and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise TaskError(
            f"reasoning_gym:{family} makes different puzzles in each process; set PYTHONHASHSEED=0 "
            "in the environment"
        )
    config_class = factory.DATASETS[family][1]
    known = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TaskError(
            f"reasoning_gym:{family} has no option {', '.join(map(repr, unknown))}; choose from "
            f"{', '.join(sorted(known))}, level and partial"
        )
    given = dict(options)
    if level is not None:
        if family not in factory.CURRICULA:
            raise TaskError(
                f"reasoning_gym:{family} has no levels; its options are {', '.join(sorted(known))}"
            )
        curriculum = factory.create_curriculum(family)
        highest = max((len(one.levels) for one in curriculum.attributes.values()), default=1) - 1
        if type(level) is not int or not 0 <= level <= highest:
            raise TaskError(f"level is {level!r}; reasoning_gym:{family} has levels 0 to {highest}")
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration()
        # A level may leave values of types unknown to JSON.
        default = config_class()
        changed = {
            name: getattr(config, name)
            for name in known
            if getattr(config, name) != getattr(default, name)
        }
        given = changed | given
    try:
        text = json.dumps(given, sort_keys=True)
        _dataset(family, text, 0, 1)
    except Exception as error:
        raise TaskError(f"reasoning_gym:{family} rejects {given}: {describe(error)}") from error
    return text


@functools.lru_cache(64)
def _dataset(family: str, options: str, seed: int, size: int) -> Any:
    return _package().create_dataset(family, **json.loads(options), seed=seed, size=size)


# Answers safe for a verifier


@functools.cache
def _gate(verifier: Callable[..., Any]) -> Callable[[str], bool]:
    """Return a test for answers safe for this verifier: all are, unless it evaluates them."""
    source = inspect.getsource(verifier)
    if "parse_expr(" in source:
        return _is_arithmetic
    if re.search(r"\b(eval|exec|sympify)\(", source):
        return _is_literal
    return lambda answer: True


def _is_literal(answer: str) -> bool:
    """Tell whether the answer is words or a Python literal, harmless to evaluate."""
    if _WORDS.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_arithmetic(answer: str) -> bool:
    """Tell whether the answer is arithmetic of numbers, names and the usual functions, of bounded
    size.
    """
    try:
        return len(answer) <= 1000 and _bits(ast.parse(answer, mode="eval").body) <= _MAX_BITS
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _bits(tree: ast.expr) -> float:
    """Bound the size of a value, in bits, or the degree of a polynomial. Raises ValueError for
    anything but arithmetic.
    """
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
        if abs(tree.value) < 1e300:
            return max(1, int(abs(tree.value)).bit_length())
        return 1e9
    if isinstance(tree, ast.Name) and (
        len(tree.id) == 1 or tree.id in _FUNCTIONS or tree.id == "pi"
    ):
        return 1
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):
        return _bits(tree.operand)
    if (
        isinstance(tree, ast.Call)
        and isinstance(tree.func, ast.Name)
        and tree.func.id in _FUNCTIONS
        and not tree.keywords
    ):
        return sum(map(_bits, tree.args))
    if isinstance(tree, ast.BinOp) and isinstance(
        tree.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow
    ):
        left = _bits(tree.left)
        right = _bits(tree.right)
        return left * 2.0 ** min(right, 64) if isinstance(tree.op, ast.Pow) else left + right
    raise ValueError(ast.dump(tree)[:80])

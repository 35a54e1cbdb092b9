"""GSM8K: grade-school problems in words, with a number for an answer (Cobbe et al. 2021, arXiv
2110.14168).

The data set's own split names: "test" is its test file. One row in ten of its train file, by a hash
of the question, is the validation split, to monitor a run without the test file.
"""

import itertools
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ttrl.tasks.answers import after_thinking, marked, opening_of, reply_text, tagged_answer
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Source,
    check_name,
    check_share,
    check_whole,
    load_rows,
    select,
    text_field,
)
from ttrl.tasks.numerals import last_number
from ttrl.tasks.task import Choice, Example, Task, question, solved

Style = Literal["plain", "boxed", "r1"]

INSTRUCTIONS: dict[str, str] = {
    "plain": "Solve the problem step by step. Then write the answer on a line of its own: #### and "
    "the number.",
    "boxed": "Solve the problem step by step. Put the final number into \\boxed{}.",
    # In the words of DeepSeek-R1 (arXiv 2501.12948, table 1), shortened.
    "r1": "First think about the problem, then give the answer. Write the reasoning in <think> "
    "</think> tags and the final "
    "number in <answer> </answer> tags: <think> reasoning here </think> <answer> number here "
    "</answer>",
}


@dataclass(frozen=True)
class GSM8KProblem:
    """One row: the question, the worked solution without calculator marks, and the right number."""

    question: str
    solution: str
    answer: Fraction


@dataclass(frozen=True)
class GSM8KGrader:
    r"""1.0 if the number of the reply's answer is right, else 0; with `format_reward` w: (1 −
    w)·right + w·format.

    The answer is the last marked one, after any thinking: the last number after `####`, in
    `\boxed{}` or `<answer>` tags. flexible: without a mark, the last number of the reply
    (flexible-extract in lm-evaluation-harness). format: see `follows_format`.
    """

    expected: Fraction
    style: Style = "plain"
    format_reward: float = 0.0
    flexible: bool = False

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1, "format": 0 or 1}), and unless `flexible`, the flexible
        verdict ("lenient")."""
        text = reply_text(choice)
        exact = self._is_right(text, self.flexible)
        formed = float(follows_format(text, self.style, opening_of(choice)))
        metrics = {"exact": exact, "format": formed}
        if not self.flexible:
            metrics["lenient"] = self._is_right(text, True)
        return (1.0 - self.format_reward) * exact + self.format_reward * formed, metrics

    def _is_right(self, text: str, flexible: bool) -> float:
        return float(read_answer(text, flexible=flexible) == self.expected)

    def reference(self) -> str:
        return write_answer("I know it.", write_number(self.expected), self.style)


def read_answer(text: str, *, flexible: bool = False) -> Fraction | None:
    """Return the number given as a reply's answer; None without one."""
    text = after_thinking(text)
    part = marked(text)
    if part is None:
        if flexible:
            return last_number(text)
        return None
    return last_number(part)


def follows_format(text: str, style: Style, opening: str = "") -> bool:
    r"""Return whether a reply has its style's form.

    plain: the last non-empty line is `####` and a number, and no other line has the mark. boxed:
    exactly one `\boxed{}` with a number. r1: `<think>…</think>`, then `<answer>…</answer>`, once
    each, and nothing before, between or after them. opening: the beginning of the text, written by
    the prompt or removed by a server's parser; see `tagged_answer`.
    """
    if style == "r1":
        answer = tagged_answer(text, opening)
        return answer is not None and last_number(answer) is not None
    if style == "boxed":
        return text.count("\\boxed{") == 1 and read_answer(text) is not None
    start = text.rstrip().rfind("\n") + 1
    line = text[start:].strip()
    return text.count("####") == 1 and line.startswith("####") and last_number(line) is not None


def write_number(value: Fraction) -> str:
    """Write a number as GSM8K does: 18, -3, 2.5, without thousands separators; as a fraction if no
    decimal is exact.
    """
    if value.denominator == 1:
        return str(value.numerator)
    places = next((k for k in range(1, 20) if (value * 10**k).denominator == 1), None)
    if places is None:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs((value * 10**places).numerator)).zfill(places + 1)
    return ("-" if value < 0 else "") + digits[:-places] + "." + digits[-places:]


def write_answer(solution: str, number: str, style: Style) -> str:
    if style == "r1":
        return f"<think>{solution}</think>\n<answer>{number}</answer>"
    return f"{solution}\n" + (f"\\boxed{{{number}}}" if style == "boxed" else f"#### {number}")


def get_gsm8k_tasks(
    split: Literal["train", "validation", "test"] = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "openai/gsm8k",
    style: Style = "plain",
    few_shot: int = 0,
    format_reward: float = 0.0,
    flexible: bool = False,
) -> list[Task]:
    """Return `n` problems (None: all of the split), no problem twice; in train, the seed decides
    selection and order.

    path: a folder with train.jsonl and test.jsonl, one file, or an id on the hub (see
        `ttrl.tasks.datasets`).
    style: "plain" (####), "boxed", or "r1" (think and answer tags); decides the prompt and the
        rewarded format.
    few_shot: solved problems before each question, as turns of the conversation, from the train
        file's training part, never the question itself; the same ones for every question.
    format_reward, flexible: see `GSM8KGrader`; 0 <= format_reward <= 1.
    """
    check_name("split", split, ("train", "validation", "test"), "gsm8k")
    check_name("style", style, INSTRUCTIONS, "gsm8k")
    check_share("format_reward", format_reward)
    check_whole("few_shot", few_shot, 0)
    problems = _load(path, split, n, seed)
    shots: list[GSM8KProblem] = []
    if few_shot:
        shots = _load(path, "train", few_shot + 1, 0)
    tasks = []
    for problem in problems:
        before = [
            _solved(shot, style)["messages"] for shot in shots if shot.question != problem.question
        ][:few_shot]
        messages = [*itertools.chain(*before), *question(_asked(problem, style))]
        tasks.append(Task(messages, GSM8KGrader(problem.answer, style, format_reward, flexible)))
    return tasks


def gsm8k_examples(
    n: int | None = None, seed: int = 0, *, path: Source = "openai/gsm8k", style: Style = "plain"
) -> list[Example]:
    """Return solved training problems for supervised training, {"messages": [user, assistant]};
    no validation or test problems.
    """
    return [_solved(problem, style) for problem in _load(path, "train", n, seed)]


def _load(path: Source, split: str, n: int | None, seed: int) -> list[GSM8KProblem]:
    """Return `n` problems of a split, as `select` does."""
    file = "test" if split == "test" else "train"
    return select(
        load_rows(path, parse_row, splits=(file,), config="main"),
        lambda problem: problem.question,
        split,
        n,
        seed,
        "gsm8k",
        held_out=file == "train",
    )


def parse_row(row: Row) -> GSM8KProblem:
    """Read {"question", "answer": worked solution, then `####` and the number}. Raises RowError."""
    question = text_field(row, "question")
    answer = text_field(row, "answer")
    solution, mark, number = answer.rpartition("####")
    value = last_number(number) if mark else None
    if value is None:
        raise RowError(f"answer ends with {answer[-40:]!r}; it must end with #### and a number")
    return GSM8KProblem(question.strip(), _without_marks(solution).strip(), value)


def _without_marks(solution: str) -> str:
    """Remove the calculator's marks: 48/2 = <<48/2=24>>24 → 48/2 = 24."""
    parts = solution.split("<<")
    return parts[0] + "".join(
        part.partition(">>")[2] if ">>" in part else "<<" + part for part in parts[1:]
    )


def _asked(problem: GSM8KProblem, style: Style) -> str:
    return f"{problem.question}\n\n{INSTRUCTIONS[style]}"


def _solved(problem: GSM8KProblem, style: Style) -> Example:
    return solved(
        _asked(problem, style), write_answer(problem.solution, write_number(problem.answer), style)
    )

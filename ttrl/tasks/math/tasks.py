r"""Load problems with mathematical answers, in the layouts of MATH, AIME and DAPO.

A row has a problem, as a text or a chat, and an answer: in a column of its own, in `reward_model`,
or in the last `\boxed{}` of a worked solution. All functions read all layouts. They differ in split
names and in prompt style.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.errors import TaskError
from ttrl.messages import Message
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Source,
    check_choice,
    check_name,
    check_share,
    field,
    from_json,
    load_rows,
    select,
)
from ttrl.tasks.math.grading import INSTRUCTIONS, MathGrader, Style, read_reply
from ttrl.tasks.math.latex import LONGEST
from ttrl.tasks.task import Task, question

Split = Literal["train", "validation", "test"]
_QUESTIONS = ("problem", "Problem", "question", "Question", "prompt")
_ANSWERS = ("answer", "Answer", "expected_answer", "final_answer")
_IDS = ("unique_id", "id", "ID", "problem_idx")
_LONGEST_PLAIN = 40
"""Limit on the characters of a bare-answer solution."""


@dataclass(frozen=True)
class MathProblem:
    """One row."""

    question: str
    answer: str
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of a chat prompt."""
    level: int = 0
    """From 1 to 5 in MATH. 0 without one."""
    subject: str = ""
    id: str = ""


def get_math_tasks(
    split: Split = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "DigitalLearningGmbH/MATH-lighteval",
    style: Style = "boxed",
    levels: Sequence[int] = (),
    subjects: Sequence[str] = (),
    format_reward: float = 0.0,
    flexible: bool = False,
) -> list[Task]:
    """Return `n` problems of MATH (Hendrycks et al. 2021, arXiv 2103.03874). None: all.

    In train, the seed decides selection and order. validation is one row in ten of the train file.
    Of a single file, test is all rows.

    path: a folder with a file for each split, the published folders of json files, a file, or an id
        on the hub, such as "HuggingFaceH4/MATH-500". Rows have "problem" and "solution", and may
        have "answer", "level" ("Level 5", or 5), and "type" or "subject".
    levels, subjects: take these only.
    style: "boxed", "r1" (think and answer tags) or "answer" (a last line `Answer: …`).
    format_reward: the share of the reward for the form.
    flexible: see MathGrader.
    """
    check_choice("levels", levels)
    check_choice("subjects", subjects)
    problems = _load(path, split)
    if levels:
        problems = [problem for problem in problems if problem.level in levels]
    if subjects:
        problems = [problem for problem in problems if problem.subject in subjects]
    if not problems:
        wanted = f"levels {list(levels)} and subjects {list(subjects)}"
        raise TaskError(f"{path} has no problems of {wanted}")
    return _tasks("math", problems, split, n, seed, style, format_reward, flexible)


def get_aime_tasks(
    split: Split = "test",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "HuggingFaceH4/aime_2024",
    style: Style = "boxed",
    format_reward: float = 0.0,
    flexible: bool = False,
) -> list[Task]:
    """Return `n` problems of AIME or of another contest. None: all.

    Such data sets have one split, named "train" or "test". Here `test` is all of it.

    path: a file, a folder, or an id on the hub, such as "AI-MO/aimo-validation-aime" or
        "math-ai/aime25". Rows have "problem" (or "Problem", "question", "Question"), and "answer"
        (or "Answer"), a text or a number.

    The rest is as in `get_math_tasks`.
    """
    problems = _load(path, split, ("test", "train"))
    return _tasks("aime", problems, split, n, seed, style, format_reward, flexible)


def get_dapo_tasks(
    split: Split = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "BytedTsinghua-SIA/DAPO-Math-17k",
    style: Style = "answer",
    format_reward: float = 0.0,
    flexible: bool = False,
) -> list[Task]:
    """Return `n` problems of DAPO-Math-17k (arXiv 2503.14476). None: all.

    path: a file, a folder, or an id on the hub, such as "open-r1/DAPO-Math-17k-Processed". Rows
        have "prompt", and "reward_model" with "ground_truth", or "solution" or "answer". A chat
        prompt is used unchanged: DAPO's ask for a last line `Answer: …`. A text prompt gets the
        style's instruction.

    The rest is as in `get_math_tasks`.
    """
    problems = _load(path, split)
    return _tasks("dapo", problems, split, n, seed, style, format_reward, flexible)


def _load(path: Source, split: str, test: Sequence[str] = ("test",)) -> list[MathProblem]:
    check_name("split", split, ("train", "validation", "test"), "mathematics")
    known: dict[MathProblem, MathProblem] = {}

    def parse(row: Row) -> MathProblem:
        problem = parse_row(row)
        return known.setdefault(problem, problem)  # DAPO's file has each row a hundred times

    return load_rows(path, parse, splits=test if split == "test" else ("train",))


def _tasks(
    what: str,
    problems: Sequence[MathProblem],
    split: str,
    n: int | None,
    seed: int,
    style: Style,
    format_reward: float,
    flexible: bool,
) -> list[Task]:
    check_name("style", style, INSTRUCTIONS, what)
    check_share("format_reward", format_reward)
    chosen = select(problems, _key, split, n, seed, what, held_out=split != "test")
    return [
        Task(
            _prompt(problem, style),
            MathGrader(problem.answer, style, format_reward, flexible),
            id=f"{what}/{problem.id}" if problem.id else "",
        )
        for problem in chosen
    ]


def _key(problem: MathProblem) -> str:
    return problem.question


def _prompt(problem: MathProblem, style: Style) -> list[Message]:
    if problem.messages:
        return [{"role": role, "content": content} for role, content in problem.messages]
    return question(f"{problem.question}\n\n{INSTRUCTIONS[style]}")


def parse_row(row: Row) -> MathProblem:
    """Read a row of any of the layouts. Raises RowError."""
    asked = field(row, *_QUESTIONS)
    messages: tuple[tuple[str, str], ...] = ()
    if isinstance(asked, list):
        messages = _messages(asked)
        asked = messages[-1][1]
    if not isinstance(asked, str) or not asked.strip():
        problem = f"the problem is {asked!r:.120}"
        raise RowError(f"{problem}; it must be a chat, or a non-empty text")
    answer = _answer(row)
    if not answer or len(answer) > LONGEST:
        problem = f"the answer is {answer!r:.120}"
        raise RowError(f"{problem}; it must be a number, or a text of 1 to {LONGEST} characters")
    level = re.search("[0-9]+", str(row.get("level") or ""))
    name = next((row[key] for key in _IDS if row.get(key) is not None), "")
    return MathProblem(
        question=asked.strip(),
        answer=answer,
        messages=messages,
        level=0 if level is None else int(level[0]),
        subject=str(row.get("subject") or row.get("type") or ""),
        id=str(name),
    )


def _messages(chat: list[Any]) -> tuple[tuple[str, str], ...]:
    needs = "it must be a text, or a list of messages with role and content"
    messages = []
    for message in chat:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(part), str) for part in ("role", "content")
        ):
            raise RowError(f"prompt has {message!r:.120}; {needs}")
        messages.append((message["role"], message["content"]))
    if not messages:
        raise RowError(f"prompt is an empty list; {needs}")
    return tuple(messages)


def _answer(row: Row) -> str:
    judged = from_json(row.get("reward_model"))  # a text in a csv file
    if isinstance(judged, dict) and judged.get("ground_truth") is not None:
        return str(judged["ground_truth"]).strip()
    for name in _ANSWERS:
        if row.get(name) is not None:
            text = str(row[name])
            return (read_reply(text) or text).strip()
    solution = row.get("solution", row.get("Solution"))
    if not isinstance(solution, str):
        known = ", ".join(map(repr, (*_ANSWERS, "reward_model", "solution")))
        raise RowError(f"no field {known}; it has {', '.join(sorted(map(str, row)))}")
    answer = read_reply(solution)
    if answer is None and "\\boxed " in solution:  # \boxed 2
        answer = solution.rpartition("\\boxed ")[2].partition("$")[0]
    if answer is None and len(solution) <= _LONGEST_PLAIN:
        answer = solution
    return (answer or "").strip()

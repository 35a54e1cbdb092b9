"""HumanEval: complete a Python function; its tests decide (Chen et al. 2021, arXiv 2107.03374). 164
problems, for evaluation.

Programs written by a model run only in `ttrl.tasks.humaneval.sandbox`: without it, there are no
tasks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import reply_text
from ttrl.tasks.datasets import Row, RowError, Source, check_name, load_rows, select, text_field
from ttrl.tasks.humaneval.code_blocks import defines, read_code
from ttrl.tasks.humaneval.sandbox import SandboxLimits, SandboxOutcome, run_sandboxed, why_not
from ttrl.tasks.task import Choice, Task, question
from ttrl.text import short

_PROMPT = (
    "Complete this Python function. Reply with the whole function, its imports included, in one "
    "code block.\n\n"
    "```python\n{prompt}```"
)
_FUTURE = re.compile(
    r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]{0,500}\)|[^\n\\]*(?:\\\r?\n[^\n\\]*)*)",
    re.MULTILINE,
)
LONGEST = 100_000
"""Limit on the characters of a program; longer replies fail."""


@dataclass(frozen=True)
class HumanEvalProblem:
    """One row: `prompt` is the function up to its body, `test` defines check(candidate), `solution`
    is a right body.
    """

    id: str
    prompt: str
    entry_point: str
    test: str
    solution: str


@dataclass(frozen=True)
class HumanEvalGrader:
    """1.0 if the problem's tests pass with the reply's function, in a sandbox; else 0. Takes about
    0.2 s of a core.

    `ttrl.tasks.humaneval.code_blocks` finds the program in the reply; code without a definition of
    the function is taken to continue the prompt. Raises GraderError on a machine without a sandbox.
    """

    problem: HumanEvalProblem
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    run: Callable[[str, SandboxLimits], SandboxOutcome] = field(default=run_sandboxed, repr=False)
    only_evaluates: ClassVar[str] = (
        "programs can read their tests' expected results, so a model trained on this score would "
        "learn to do that"
    )

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"ran": 1 unless time, memory or a crash ended it})."""
        code = read_code(reply_text(choice), self.problem.entry_point)
        if not code.strip() or len(code) > LONGEST:
            return 0.0, {"ran": 0.0}
        outcome = self.run(program(self.problem, code), self.limits)
        ended = outcome.reason.startswith(("out of", "ended", "MemoryError"))
        return float(outcome.passed), {"ran": float(not ended)}

    def reference(self) -> str:
        return f"```python\n{self.problem.prompt}{self.problem.solution}```"


def program(problem: HumanEvalProblem, code: str) -> str:
    """Return the program to run: the reply's function, after the prompt's lines before it, and the
    tests.

    Imports from `__future__` go first: Python takes them nowhere else.
    """
    before = problem.prompt
    if defines(code, problem.entry_point):
        start = re.search(rf"^def {re.escape(problem.entry_point)}\b", before, re.MULTILINE)
        if start is not None:
            before = before[: start.start()]
        else:
            before = ""
    code = before + code
    future = "".join(f"{found}\n" for found in _FUTURE.findall(code))
    code = _FUTURE.sub("", code)
    return f"{future}{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def get_humaneval_tasks(
    split: Literal["test"] = "test",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "openai/openai_humaneval",
    limits: SandboxLimits | None = None,
) -> list[Task]:
    """Return `n` problems (None: all), each once, the same for every seed. There is only a test
    split: they are for evaluation.

    path: a file, a folder with test.jsonl, or an id on the Hugging Face hub; rows as published:
    "task_id", "prompt", "entry_point", "test", "canonical_solution". Raises TaskError, also on a
    machine without a working sandbox; it tries.
    """
    check_name("split", split, ("test",), "humaneval")
    if limits is not None and not isinstance(limits, SandboxLimits):
        raise TaskError(f"limits is {short(limits, 80)}; give SandboxLimits(seconds=…, memory=…)")
    problems = select(
        load_rows(path, parse_row, splits=("test",)),
        lambda problem: problem.id,
        split,
        n,
        seed,
        "humaneval",
        held_out=False,
        question=lambda problem: problem.prompt,
        answer=lambda problem: problem.test,
    )
    reason = why_not()
    if reason is not None:
        raise TaskError(reason)
    return [
        Task(
            question(_PROMPT.format(prompt=one.prompt)),
            HumanEvalGrader(one, limits or SandboxLimits()),
            id=one.id,
        )
        for one in problems
    ]


def parse_row(row: Row) -> HumanEvalProblem:
    """Read a row as `get_humaneval_tasks` describes it. Raises RowError."""
    names = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
    problem = HumanEvalProblem(*(text_field(row, name) for name in names))
    if not problem.entry_point.isidentifier() or not defines(problem.prompt, problem.entry_point):
        raise RowError(f"entry_point {problem.entry_point!r:.80} is not defined in the prompt")
    if not problem.test.count("def check("):
        raise RowError("test has no function check")
    return problem

"""Tasks of inspect_ai (UK AISI, MIT; read: 0.3.285) in `ttrl eval`, run by inspect itself behind an
endpoint of ours.

Its packages pin what ttrl may not be able to have, so it may live in a Python of its own:
`python=`, or TTRL_INSPECT_AI_PYTHON. A sample is a process of it (`ttrl.agents.agent_worker`).
Models that a task asks beside (graders) are the policy, as inspect has it where no role is given,
so training refuses these tasks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ttrl.agents.agent_task import agent_task
from ttrl.agents.elsewhere import list_rows, playing, worker_program
from ttrl.tasks.datasets import check_count, check_name
from ttrl.tasks.task import RolloutLimits, Task, question

_MOST = 100_000
_ONLY_EVALUATES = (
    "a scorer of inspect that asks a model asks the policy, whose verdicts would be trained as "
    "answers"
)


def get_inspect_tasks(
    name: str,
    split: str = "test",
    n: int | None = None,
    seed: int = 0,
    *,
    python: str | None = None,
    ignore: Sequence[str] = (),
    limits: RolloutLimits | None = None,
    **options: Any,
) -> list[Task]:
    """Return the first `n` samples of a task, `n` None: all.

    name: "PACKAGE/TASK" of a package that is installed there, or "FILE.py:TASK", or "FILE.py" with
        one task.
    python: of the environment in which inspect_ai is installed. options: the task's parameters.
    ignore: of requests, as in `agent_task`: a task that sets a temperature needs ["temperature"].
    limits: `turns` and `tokens` are inspect's, so that it scores what reaches them.

    The reward is the first score, as inspect counts it (C 1, P 0.5, I and N 0); metrics: all
    scores, and `stopped` (a limit). Raises TaskError where inspect_ai or the task is missing.
    """
    check_name("split", split, ("test",), f"inspect_ai:{name}")
    if n is not None:
        check_count(n)
    limits = limits or RolloutLimits(seconds=300.0)
    program = worker_program("inspect_ai", python)
    order: dict[str, Any] = {
        "package": "inspect_ai",
        "id": name.replace(".py:", ".py@"),
        "options": options,
    }
    order |= {"turns": limits.turns, "tokens": limits.tokens}
    rows = list_rows(program, {**order, "do": "list", "most": _MOST}, f"inspect_ai:{name}")
    tasks = [
        agent_task(
            playing(program, order, idx=row["idx"]),
            messages=question(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"],
            id=f"inspect_ai/{row['name']}/{row['idx']}",
            limits=limits,
            ignore=ignore,
        )
        for row in rows[:n]
    ]
    for task in tasks:
        rollout: Any = task.rollout
        task.rollout = dataclasses.replace(rollout, only_evaluates=_ONLY_EVALUATES)
    return tasks

"""Run tasks of inspect_ai (UK AISI, MIT; read: 0.3.285) in `ttrl eval`, by inspect itself behind
our endpoint.

Its pins may conflict with ttrl's, so it may need its own Python: `python=`, or
TTRL_INSPECT_AI_PYTHON. A sample is a process of it (`ttrl.agents.agent_worker`). Any other model of
a task (a grader) is the policy, inspect's default without a role. Training therefore refuses these
tasks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ttrl.agents.agent_task import agent_task
from ttrl.agents.agent_worker import Order
from ttrl.agents.elsewhere import list_rows, playing, worker_program
from ttrl.tasks.datasets import check_count, check_name
from ttrl.tasks.task import RolloutLimits, Task, question

_MOST = 100_000
_ONLY_EVALUATES = (
    "a scorer of inspect with a model would ask the policy, and its verdicts would be trained as "
    "replies"
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

    name: "PACKAGE/TASK" of an installed package, "FILE.py:TASK", or "FILE.py" with one task.
    python: Python of the environment with inspect_ai.
    options: the task's parameters.
    ignore: of requests, as in `agent_task`; a task with its own temperature needs ["temperature"].
    limits: inspect applies `turns` and `tokens` itself, so it scores truncated samples.

    The reward is the first score, as inspect counts it (C 1, P 0.5, I and N 0); metrics: all
    scores, and `stopped` (a limit). Raises TaskError if inspect_ai or the task is missing.
    """
    check_name("split", split, ("test",), f"inspect_ai:{name}")
    if n is not None:
        check_count(n)
    limits = limits or RolloutLimits(seconds=300.0)
    program = worker_program("inspect_ai", python)
    order = Order(
        package="inspect_ai",
        id=name.replace(".py:", ".py@"),
        options=options,
        turns=limits.turns,
        tokens=limits.tokens,
        most=_MOST,
    )
    rows = list_rows(program, order, f"inspect_ai:{name}")
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

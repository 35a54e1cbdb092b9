"""Tasksets of verifiers (Prime Intellect, Apache-2.0; read: v1 of 0.4.0), played by verifiers
itself behind an endpoint of ours.

verifiers pins an openai and an mcp that ttrl cannot have, so it has a Python of its own, with the
tasksets installed beside it: `python=`, or the environment variable TTRL_VERIFIERS_PYTHON. A sample
is a process of it (`ttrl.agents.worker`), which starts the harness, its tools, scores the trace,
and posts the reward; what is asked of the model on the way is the rollout.
"""

import random
from collections.abc import Sequence
from typing import Any

from ttrl.agents.elsewhere import list_rows, playing, worker_program
from ttrl.agents.task import agent_task
from ttrl.errors import TaskError
from ttrl.messages import Message
from ttrl.tasks.datasets import check_count, check_name
from ttrl.tasks.task import RolloutLimits, Task
from ttrl.tasks.words import in_validation
from ttrl.text import short

_SPLITS = ("train", "validation", "all")


def get_verifiers_tasks(
    name: str,
    split: str = "train",
    n: int | None = 32,
    seed: int = 0,
    *,
    python: str | None = None,
    harness: str | None = None,
    runtime: str = "subprocess",
    ignore: Sequence[str] = (),
    limits: RolloutLimits | None = None,
    **options: Any,
) -> list[Task]:
    """Return at most `n` tasks of a taskset, `n` None: all.

    name: the id, as its package is called, "gsm8k-v1", with or without its owner. options: of the
        taskset's config.
    split: a tenth of the tasks is held out, by a hash of their keys: "train", "validation", or
        "all".
    python: of the environment in which verifiers and the taskset are installed.
    harness: the taskset's own by default, else "null", which chats and calls the taskset's tools;
        "bash" lets the model run commands. runtime: where that is done: "subprocess", with your
        rights, or "docker".
    ignore: of requests, as in `agent_task`.
    limits: `turns` and `tokens` are the agent's, so that verifiers scores what reaches them.

    The reward is the trace's: the sum of the task's rewards, times their weights. Metrics: the
    task's, and each reward without its weight; `stopped`: a stop condition or a limit ended the
    conversation. Raises TaskError where verifiers or the taskset is missing, or the taskset has no
    such tasks.
    """
    check_name("split", split, _SPLITS, f"verifiers:{name}")
    if n is not None:
        check_count(n)
    limits = limits or RolloutLimits(seconds=300.0)
    program = worker_program("verifiers", python)
    order: dict[str, Any] = {
        "package": "verifiers",
        "id": name,
        "harness": harness,
        "runtime": runtime,
        "options": options,
    }
    order |= {"turns": limits.turns, "tokens": limits.tokens}
    most = 20 * n + 100 if n is not None else 1000
    rows = [
        row
        for row in list_rows(program, {**order, "do": "list", "most": most}, f"verifiers:{name}")
        if _is_of(row, split)
    ]
    if split == "train":
        random.Random(seed).shuffle(rows)
    if not rows:
        raise TaskError(f"verifiers:{name} has no {split} tasks")
    return [
        agent_task(
            playing(program, order, idx=row["idx"], key=row["key"]),
            messages=_messages(row),
            id=f"verifiers/{name.rpartition('/')[2]}/{row['key'][:16]}",
            limits=limits,
            ignore=ignore,
        )
        for row in rows[:n]
    ]


def _is_of(row: dict[str, Any], split: str) -> bool:
    return split == "all" or in_validation(row["key"], 10) == (split == "validation")


def _messages(row: dict[str, Any]) -> list[Message]:
    """Return what is known of a task's conversation before it begins."""
    if row["prompt"] is not None:
        prompt = row["prompt"]
    else:
        prompt = "(the environment begins the conversation)"
    if row["system_prompt"]:
        system = [{"role": "system", "content": row["system_prompt"]}]
    else:
        system = []
    if isinstance(prompt, str):
        given = [{"role": "user", "content": prompt}]
    else:
        given = prompt
    if not isinstance(given, list):
        raise TaskError(
            f"verifiers: a prompt is {short(prompt, 80)}; it is a text or a list of messages"
        )
    return [*system, *given]

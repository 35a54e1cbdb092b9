"""Play tasksets of verifiers (Prime Intellect, Apache-2.0; read: v1 of 0.4.0), by verifiers itself
behind our endpoint.

verifiers pins an openai and an mcp in conflict with ttrl's. It therefore has its own Python, with
the tasksets installed: `python=`, or the environment variable TTRL_VERIFIERS_PYTHON. A sample is a
process of it (`ttrl.agents.agent_worker`): it starts the harness and its tools, scores the trace,
and posts the reward. Its requests to the model are the rollout.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.agents.agent_task import agent_task
from ttrl.agents.agent_worker import Order
from ttrl.agents.elsewhere import list_rows, playing, worker_program
from ttrl.errors import TaskError
from ttrl.messages import Message
from ttrl.tasks.datasets import check_count, check_name
from ttrl.tasks.task import RolloutLimits, Task, question
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

    name: the package's name, "gsm8k-v1", with or without its owner.
    options: of the taskset's config.
    split: "train", "validation" or "all"; a tenth of the tasks is held out, by a hash of their
        keys.
    python: Python of the environment with verifiers and the taskset.
    harness: the taskset's own by default, else "null" for chat and the taskset's tools; "bash" lets
        the model run commands.
    runtime: of the harness: "subprocess", with your rights, or "docker".
    ignore: of requests, as in `agent_task`.
    limits: verifiers applies `turns` and `tokens` itself, so it scores truncated episodes.

    The reward is the trace's: the sum of the task's rewards, times their weights. Metrics: the
    task's, and each reward without its weight; `stopped`: a stop condition or a limit ended the
    conversation. Raises TaskError if verifiers, the taskset or such tasks are missing.
    """
    check_name("split", split, _SPLITS, f"verifiers:{name}")
    if n is not None:
        check_count(n)
    limits = limits or RolloutLimits(seconds=300.0)
    program = worker_program("verifiers", python)
    order = Order(
        package="verifiers",
        id=name,
        options=options,
        turns=limits.turns,
        tokens=limits.tokens,
        harness=harness,
        runtime=runtime,
        most=1000 if n is None else 20 * n + 100,
    )
    listed = list_rows(program, order, f"verifiers:{name}")
    rows = [row for row in listed if _is_of(row, split)]
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


def _is_of(row: Mapping[str, Any], split: str) -> bool:
    return split == "all" or in_validation(row["key"], 10) == (split == "validation")


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """Return the known start of a task's conversation."""
    prompt = row["prompt"]
    if prompt is None:
        prompt = "(the environment begins the conversation)"
    if isinstance(prompt, str):
        prompt = question(prompt)
    if not isinstance(prompt, list):
        raise TaskError(
            f"verifiers: a prompt is {short(prompt, 80)}; it must be a text or a list of messages"
        )
    if row["system_prompt"]:
        return [{"role": "system", "content": row["system_prompt"]}, *prompt]
    return prompt

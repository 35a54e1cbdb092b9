"""Play tasks of packages with conflicting pins, in a Python with the package and without ttrl.

    python -P worker.py '{"package": "verifiers", "do": "list", …}'  → a JSON line for each task
    python -P worker.py '{"package": "inspect_ai", "do": "play", …}' → posts the reward, like any
        agent of ttrl

Each package plays its tasks itself and asks ttrl's endpoint for the model. A failure ends this
process with a nonzero status.

verifiers (`Env.run_episode`): the harness program runs in this Python, with its dependencies
installed; verifiers would have uv install them. inspect_ai (`eval` of one sample): the task's
solver, sandbox, limits and scorers.
"""

import asyncio
import hashlib
import json
import math
import os
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Order:
    """The worker's command line, as JSON."""

    package: str
    id: str
    """Of the taskset, or the task."""
    options: dict[str, Any]
    turns: int
    tokens: int | None
    harness: str | None = None
    runtime: str = ""
    do: str = "list"
    most: int = 0
    """The longest listing."""
    idx: Any = None
    """The task to play, and its key."""
    key: str = ""
    task_variable: str = ""
    """The environment variable with the path of the endpoint's description."""


# verifiers


def make_environment(order: Order) -> Any:
    """Return verifiers' environment of a taskset: its own, else a single agent."""
    from verifiers.v1 import Env, EnvConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import default_harness_id, environment_class, load_environment

    environment = environment_class(order.id)
    config: Any = concrete_type(environment, EnvConfig, origin=Env) or EnvConfig
    harness = order.harness
    if harness is None and default_harness_id(order.id) == "bash":
        harness = "null"  # verifiers' own default lets the model run commands here
    role = {
        "runtime": {"type": order.runtime},
        "max_turns": order.turns,
        "max_output_tokens": order.tokens,
    }
    roles = {
        name: dict(role)
        for name, field in config.model_fields.items()
        if isinstance(field.default, AgentConfig)
    }
    for name, given in roles.items():
        if harness is not None and config.model_fields[name].default.harness is None:
            given["harness"] = {"id": harness}
    return load_environment(config(taskset={"id": order.id, **order.options}, **roles))


def list_verifiers(order: Order) -> None:
    """Write a line for each task."""
    taskset = make_environment(order).taskset
    for task in taskset.take(order.most) if not taskset.bounded else taskset:
        row = task.data.model_dump(mode="json")
        told = {
            "idx": row["idx"],
            "key": task.key,
            "prompt": row["prompt"],
            "system_prompt": row["system_prompt"],
        }
        sys.stdout.write(json.dumps(told) + "\n")


async def play_verifiers(order: Order) -> tuple[float, dict[str, float]]:
    """Play a task; return reward and metrics. Raises RuntimeError for a failed episode."""
    from verifiers.v1 import EvalClientConfig, ModelContext
    from verifiers.v1.types import SamplingConfig

    environment = make_environment(order)
    (task,) = environment.taskset.include(idx=[str(order.idx)])
    if task.key != order.key:
        raise RuntimeError(
            f"task {order.idx} differs from the listed one; make load() return the same tasks "
            "each time"
        )
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = ModelContext(
        client=client, model=os.environ["OPENAI_MODEL"], sampling=SamplingConfig()
    )
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        raise RuntimeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"
        )
    if len(episode.traces) != 1 or not episode.traces[0].agent.trainable:
        names = ", ".join(trace.agent.name for trace in episode.traces)
        raise RuntimeError(
            f"the episode has several agents ({names}); ttrl trains one agent per episode"
        )
    (trace,) = episode.traces
    if trace.is_timeout and trace.stop_condition in (
        "setup_timeout",
        "finalize_timeout",
        "scoring_timeout",
    ):
        raise RuntimeError(f"the episode reached the task's own limit: {trace.stop_condition}")
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {
        name: value for name, value in {**trace.metrics, **scores}.items() if value is not None
    }
    stopped = trace.stop_condition not in (None, "agent_completed", "user_closed")
    return trace.reward, {**metrics, "stopped": float(stopped)}


def use_this_python() -> None:
    """Run the program of chat harnesses in this Python, with its dependencies installed."""
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    theirs = SubprocessRuntime.prepare_uv_script

    async def prepare(
        self: Any, script: Any, env: Any = None, *, activate: bool = True
    ) -> list[str]:
        if script != CHAT_PROGRAM_SOURCE:
            found: list[str] = await theirs(self, script, env, activate=activate)
            return found
        path = Path(self.scripts_dir, f"ttrl-{hashlib.sha256(script.encode()).hexdigest()}.py")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(script)
            new.replace(path)
        return [sys.executable, "-P", str(path)]

    SubprocessRuntime.prepare_uv_script = prepare


# inspect_ai


def load_task(order: Order) -> Any:
    """Return the named task."""
    from inspect_ai._eval.loader import load_tasks

    found = load_tasks([order.id], order.options)
    if len(found) != 1:
        raise RuntimeError(
            f"{order.id} names {len(found)} tasks ({', '.join(one.name for one in found)})"
        )
    return found[0]


def list_inspect(order: Order) -> None:
    """Write a line for each sample."""
    task = load_task(order)
    for number, sample in zip(range(order.most), task.dataset, strict=False):
        given = sample.input
        prompt = (
            given
            if isinstance(given, str)
            else [{"role": message.role, "content": message.text} for message in given]
        )
        told = {
            "idx": sample.id if sample.id is not None else number + 1,
            "name": task.name,
            "prompt": prompt,
        }
        sys.stdout.write(json.dumps(told) + "\n")


def play_inspect(order: Order, folder: Path) -> tuple[float, dict[str, float]]:
    """Run one sample; return reward and metrics. Raises RuntimeError if it failed."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    model = get_model(
        "openai-api/ttrl/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        stream=False,
    )
    (log,) = evaluate(
        load_task(order),
        model,
        sample_id=order.idx,
        epochs=1,
        max_retries=0,
        turn_limit=order.turns,
        token_limit=order.tokens,
        log_dir=str(folder / "logs"),
        log_format="json",
        display="none",
        score_display=False,
    )
    error = log.error or next(
        (sample.error for sample in log.samples or [] if sample.error is not None), None
    )
    if error is not None or log.status != "success" or len(log.samples or []) != 1:
        raise RuntimeError(
            error.message if error is not None else f"inspect ended with {log.status}"
        )
    (sample,) = log.samples
    numbers: dict[str, float] = {}
    for scorer, score in (sample.scores or {}).items():
        if isinstance(score.value, dict):
            values = score.value
        else:
            values = {"": score.value}
        numbers |= {
            f"{scorer}/{name}".rstrip("/"): number(value, f"{scorer}'s score {name}")
            for name, value in values.items()
        }
    if not numbers:
        raise RuntimeError("no scorer has scored it")
    return next(iter(numbers.values())), {**numbers, "stopped": float(sample.limit is not None)}


def number(value: Any, what: str) -> float:
    """Return a score's value as inspect counts it: C is 1, P a half, I and N are 0."""
    from inspect_ai.scorer import value_to_float

    if isinstance(value, list) or value is None:
        raise RuntimeError(f"{what} is {value!r}, not a number")
    found = float(value_to_float()(value))
    if not math.isfinite(found):
        raise RuntimeError(f"{what} is {value!r}, not a number: the sample was not scored")
    return found


# Both packages


def main() -> None:
    """Run the command line."""
    order = Order(**json.loads(sys.argv[1]))
    is_verifiers = order.package == "verifiers"
    if is_verifiers:
        use_this_python()
    if order.do == "list":
        if is_verifiers:
            return list_verifiers(order)
        return list_inspect(order)
    place = Path(os.environ[order.task_variable])
    told = json.loads(place.read_text())
    if is_verifiers:
        reward, metrics = asyncio.run(play_verifiers(order))
    else:
        reward, metrics = play_inspect(order, place.parent)
    headers = {"Authorization": f"Bearer {told['reward_key']}", "Content-Type": "application/json"}
    result = json.dumps({"reward": reward, "metrics": metrics}).encode()
    # The address is ttrl's own.
    request = urllib.request.Request(told["reward_url"], result, headers)  # noqa: S310
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()
    return None


if __name__ == "__main__":
    main()

"""Plays tasks of verifiers in an environment of its own: run by path, by a Python that has verifiers and need not have ttrl.

    python -P play_verifiers.py '{"do": "list", "id": "gsm8k-v1", …}'   → a JSON line for each task
    python -P play_verifiers.py '{"do": "play", "idx": 3, "key": …}'    → the reward is posted, as agents of ttrl do

A task is played as verifiers itself plays it (`Env.run_episode`): its harness talks to verifiers' interception server, and that
to ttrl's endpoint. Only where a harness's program runs differs: verifiers would have uv install its dependencies, which this
Python has. What fails, in whichever stage, ends this process with a status.
"""

import asyncio
import hashlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

_MOST_LISTED = 100_000


def make_environment(order: dict[str, Any]) -> Any:
    """Return verifiers' environment of a taskset: its own, else a single agent."""
    from verifiers.v1 import Env, EnvConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import default_harness_id, environment_class, load_environment

    environment = environment_class(order["id"])
    config: Any = concrete_type(environment, EnvConfig, origin=Env) or EnvConfig
    harness = order["harness"]
    if harness is None and default_harness_id(order["id"]) == "bash":
        harness = "null"  # verifiers' own default lets the model run commands here
    role = {"runtime": {"type": order["runtime"]}, "max_turns": order["turns"], "max_output_tokens": order["tokens"]}
    roles = {name: dict(role) for name, field in config.model_fields.items() if isinstance(field.default, AgentConfig)}
    for name, given in roles.items():
        if harness is not None and config.model_fields[name].default.harness is None:
            given["harness"] = {"id": harness}
    return load_environment(config(taskset={"id": order["id"], **order["options"]}, **roles))


def list_tasks(order: dict[str, Any]) -> None:
    """Write a line for each task."""
    taskset = make_environment(order).taskset
    for task in taskset.take(min(order["most"], _MOST_LISTED)) if not taskset.bounded else taskset:
        row = task.data.model_dump(mode="json")
        told = {"idx": row["idx"], "key": task.key, "prompt": row["prompt"], "system_prompt": row["system_prompt"]}
        sys.stdout.write(json.dumps(told) + "\n")


async def play(order: dict[str, Any]) -> dict[str, Any]:
    """Play a task; return {"reward", "metrics"}. Raises RuntimeError for an episode that failed."""
    from verifiers.v1 import EvalClientConfig, ModelContext
    from verifiers.v1.types import SamplingConfig

    environment = make_environment(order)
    (task,) = environment.taskset.include(idx=[str(order["idx"])])
    if task.key != order["key"]:
        raise RuntimeError(f"task {order['idx']} is another one than when the tasks were listed; does load() draw at random?")
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = ModelContext(client=client, model=os.environ["OPENAI_MODEL"], sampling=SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    if len(episode.traces) != 1 or not episode.traces[0].agent.trainable:
        names = ", ".join(trace.agent.name for trace in episode.traces)
        raise RuntimeError(f"the episode has several agents ({names}); ttrl plays those with one, which is trained")
    (trace,) = episode.traces
    if trace.is_timeout and trace.stop_condition in ("setup_timeout", "finalize_timeout", "scoring_timeout"):
        raise RuntimeError(f"the task's own limit was reached: {trace.stop_condition}")
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in {**trace.metrics, **scores}.items() if value is not None}
    return {
        "reward": trace.reward,
        "metrics": {**metrics, "stopped": float(trace.stop_condition not in (None, "agent_completed"))},
    }


def use_this_python() -> None:
    """Have the program of chat harnesses run by this Python, which has all that it depends on."""
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    theirs = SubprocessRuntime.prepare_uv_script

    async def prepare(self: Any, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
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


def main() -> None:
    """Run the command line."""
    order = json.loads(sys.argv[1])
    use_this_python()
    if order["do"] == "list":
        return list_tasks(order)
    told = json.loads(Path(os.environ["TTRL_AGENT_TASK"]).read_text())
    body = json.dumps(asyncio.run(play(order))).encode()
    headers = {"Authorization": f"Bearer {told['reward_key']}", "Content-Type": "application/json"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    direct.open(urllib.request.Request(told["reward_url"], body, headers), timeout=60).close()  # noqa: S310 - ttrl's own address
    return None


if __name__ == "__main__":
    main()

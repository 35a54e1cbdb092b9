"""Runs samples of inspect_ai's tasks: by path, by a Python that has inspect_ai and need not have ttrl.

    python -P play_inspect.py '{"do": "list", "id": "evals.py@arithmetic", …}'   → a JSON line for each sample
    python -P play_inspect.py '{"do": "play", "idx": 3, …}'                      → its score is posted, as agents of ttrl do

A sample is run by inspect's own `eval`: the task's solver, sandbox, limits and scorers. What fails ends this process with a
status.
"""

import json
import math
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


def load_task(order: dict[str, Any]) -> Any:
    """Return the one task that is named."""
    from inspect_ai._eval.loader import load_tasks

    found = load_tasks([order["id"]], order["options"])
    if len(found) != 1:
        raise RuntimeError(f"RuntimeError: {order['id']} names {len(found)} tasks ({', '.join(one.name for one in found)})")
    return found[0]


def list_samples(order: dict[str, Any]) -> None:
    """Write a line for each sample."""
    task = load_task(order)
    for number, sample in zip(range(order["most"]), task.dataset, strict=False):
        given = sample.input
        prompt = given if isinstance(given, str) else [{"role": message.role, "content": message.text} for message in given]
        told = {"idx": sample.id if sample.id is not None else number + 1, "name": task.name, "prompt": prompt}
        sys.stdout.write(json.dumps(told) + "\n")


def play(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one sample; return {"reward", "metrics"}. Raises RuntimeError where it failed."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    model = get_model(
        "openai-api/ttrl/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], stream=False
    )
    limits = {"turn_limit": order["turns"], "token_limit": order["tokens"]}
    options = {"log_dir": str(folder / "logs"), "log_format": "json", "display": "none", "score_display": False}
    (log,) = evaluate(load_task(order), model, sample_id=order["idx"], epochs=1, max_retries=0, **limits, **options)
    error = log.error or next((sample.error for sample in log.samples or [] if sample.error is not None), None)
    if error is not None or log.status != "success" or len(log.samples or []) != 1:
        raise RuntimeError(error.message if error is not None else f"inspect ended with {log.status}")
    (sample,) = log.samples
    numbers: dict[str, float] = {}
    for scorer, score in (sample.scores or {}).items():
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        numbers |= {f"{scorer}/{name}".rstrip("/"): number(value, f"{scorer}'s score {name}") for name, value in values.items()}
    if not numbers:
        raise RuntimeError("no scorer has scored it")
    return {"reward": next(iter(numbers.values())), "metrics": {**numbers, "stopped": float(sample.limit is not None)}}


def number(value: Any, what: str) -> float:
    """Return a score's value as inspect counts it: C is 1, P a half, I and N are 0."""
    from inspect_ai.scorer import value_to_float

    if isinstance(value, list) or value is None:
        raise RuntimeError(f"{what} is {value!r}, which is no number")
    found = float(value_to_float()(value))
    if not math.isfinite(found):
        raise RuntimeError(f"{what} is {value!r}, which is no number: the sample was not scored")
    return found


def main() -> None:
    """Run the command line."""
    order = json.loads(sys.argv[1])
    if order["do"] == "list":
        return list_samples(order)
    place = Path(os.environ["TTRL_AGENT_TASK"])
    told = json.loads(place.read_text())
    body = json.dumps(play(order, place.parent)).encode()
    headers = {"Authorization": f"Bearer {told['reward_key']}", "Content-Type": "application/json"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    direct.open(urllib.request.Request(told["reward_url"], body, headers), timeout=60).close()  # noqa: S310 - ttrl's own address
    return None


if __name__ == "__main__":
    main()

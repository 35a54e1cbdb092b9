"""`ttrl eval` and `ttrl compare`: their arguments, and what they print."""

import argparse
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from ttrl.errors import UserError

EVAL_HELP = "ask a model the tasks of one or more families: accuracy with intervals, pass@k, tokens, cost"
COMPARE_HELP = "compare two evaluations task by task"


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ttrl eval`."""
    parser.add_argument("model", metavar="MODEL_OR_URL", help="a model folder or hub name, or a server's address (http://…/v1)")
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="LIST",
        help="families, with commas: gsm8k=data/gsm8k,letter_counting,sort_letters@train,my_task.py",
    )
    parser.add_argument("--n", type=int, metavar="N", help="tasks of each at the most (all there are, or 200 of those made)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="replies to each task (1)")
    parser.add_argument("--pass-at", type=_whole_numbers, default=[], metavar="K,K", help="k of pass@k (1, 2, 4, … K)")
    parser.add_argument("--seed", type=int, default=0, help="which tasks of a train split (0)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="FAMILY.NAME=VALUE", help="of a family: gsm8k.style=r1; may be repeated"
    )
    asking = parser.add_argument_group("sampling")
    asking.add_argument("--temperature", type=float, help="0 for one reply a task, 1 for several")
    asking.add_argument("--top-p", type=float)
    asking.add_argument("--max-tokens", type=int, metavar="N", help="of one reply (what the model's context has room for)")
    asking.add_argument("--system", metavar="TEXT", help="a system message for every task")
    asking.add_argument("--params", type=_json_object, default={}, metavar="JSON", help='others: {"top_k": 20, "seed": 1}')
    asking.add_argument("--chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help="of its chat template")
    server = parser.add_argument_group("server")
    server.add_argument("--model", dest="name", metavar="NAME", help="under which the address serves it (the first it lists)")
    server.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="VARIABLE", help="environment variable with its key (OPENAI_API_KEY)"
    )
    server.add_argument("--dtype", help="of a server that is started: float32, bfloat16, auto (float32 on CPU)")
    server.add_argument("--max-model-len", type=int, metavar="N", help="the same: tokens of prompt and reply")
    server.add_argument("--server-args", type=_json_object, default={}, metavar="JSON", help="the same: arguments of vLLM")
    server.add_argument("--server-log", type=Path, metavar="FILE", help="the same: where it logs")
    server.add_argument("--concurrency", type=int, metavar="N", help="requests at once (what the server's KV cache has room for)")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--output", type=Path, metavar="FILE.json", help="the result, with every task's score")
    kept.add_argument("--samples-file", type=Path, metavar="FILE.jsonl", help="every reply with its grade")
    kept.add_argument("--cache", metavar="URL", help="a folder, s3://…: replies are kept there, and the same command goes on")
    kept.add_argument("--weights-digest", metavar="TEXT", help="with --cache and an address on this machine: names its weights")
    kept.add_argument("--prices", type=_prices, metavar="IN,OUT", help="dollars per million prompt and completion tokens")
    kept.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument("--isolated", action="store_true", help="run graders in processes that can be ended")
    parser.add_argument("--grader-timeout", type=float, default=60.0, metavar="SECONDS", help="for one grade (60)")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ttrl compare`."""
    parser.add_argument("first", type=Path, metavar="FIRST.json", help="what `ttrl eval --output` wrote")
    parser.add_argument("second", type=Path, metavar="SECOND.json", help="the same of another model, or after training")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def evaluated(arguments: argparse.Namespace) -> str:
    """Evaluates; returns the table."""
    from ttrl.evaluation.evaluate import EvalConfig, run_evaluation

    logging.getLogger("ttrl.evaluation.evaluate").setLevel(logging.INFO)
    given = {name: value for name, value in vars(arguments).items() if name in {field.name for field in fields(EvalConfig)}}
    config = EvalConfig(
        **given,
        options=dict(map(_option, arguments.option)),
        samples_per_task=arguments.samples,
        system_prompt=arguments.system,
        key_variable=arguments.api_key_env,
    )
    result = run_evaluation(config)
    return result.table() + (f"\nwritten to {arguments.output}" if arguments.output is not None else "")


def compared(arguments: argparse.Namespace) -> str:
    """Compares; returns a table, or JSON."""
    from ttrl.evaluation.comparison import compare

    comparison = compare(arguments.first, arguments.second, confidence=arguments.confidence)
    return json.dumps(comparison.to_json(), indent=1) if arguments.json else comparison.table()


def _option(text: str) -> tuple[str, Any]:
    """gsm8k.few_shot=4 → ("gsm8k.few_shot", 4): JSON where it is, else text."""
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise UserError(f"--option {text!r}: give FAMILY.NAME=VALUE, such as gsm8k.style=r1")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r}: give an object, such as {{"seed": 1}}')
    return value


def _whole_numbers(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers with commas, such as 1,8")
    return [int(part) for part in text.split(",")]


def _prices(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give two numbers with a comma, such as 0.15,0.60") from None
    return first, second

"""`ttrl eval` and `ttrl compare`: evaluate a model, and compare two evaluations."""

import argparse
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from ttrl.errors import UserError
from ttrl.messages import JsonObject
from ttrl.system.console import note, say


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL_OR_URL",
        help="a model folder, a name of `ttrl models` or on the hub, or a server's address "
        "(http://…/v1)",
    )
    families = (
        "families, with commas: gsm8k=data/gsm8k,letter_counting,sort_letters@train,my_task.py"
    )
    parser.add_argument("--tasks", required=True, metavar="LIST", help=families)
    parser.add_argument(
        "--n",
        type=int,
        metavar="N",
        help="at most N tasks of each family (default: all, or 200 generated ones)",
    )
    parser.add_argument(
        "--samples-per-task",
        "--samples",
        type=int,
        default=1,
        metavar="K",
        help="replies per task (default: 1)",
    )
    parser.add_argument(
        "--pass-at",
        type=_whole_numbers,
        default=[],
        metavar="K,K",
        help="k of pass@k (1, 2, 4, … K)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for drawing tasks of a train split (default: 0)"
    )
    option = "an option of a family: gsm8k.style=r1; may be repeated"
    parser.add_argument(
        "--option", action="append", default=[], metavar="FAMILY.NAME=VALUE", help=option
    )
    asking = parser.add_argument_group("sampling")
    asking.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature (default: 0 for one reply per task, 1 for several)",
    )
    asking.add_argument("--top-p", type=float)
    asking.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens per reply (default: the rest of the model's context)",
    )
    asking.add_argument(
        "--system-prompt", "--system", metavar="TEXT", help="a system message for every task"
    )
    asking.add_argument(
        "--params",
        type=_json_object,
        default={},
        metavar="JSON",
        help='other sampling parameters: {"top_k": 20, "seed": 1}',
    )
    asking.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="arguments of its chat template",
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--name",
        "--model",
        dest="name",
        metavar="NAME",
        help="the model's name on that server (default: the first one listed)",
    )
    key = "the environment variable with the server's key (default: OPENAI_API_KEY)"
    server.add_argument(
        "--key-variable", "--api-key-env", default="OPENAI_API_KEY", metavar="VARIABLE", help=key
    )
    server.add_argument(
        "--dtype", help="for a local server: fp32, bf16, auto (default: auto, fp32 on CPU)"
    )
    server.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="for a local server: tokens of prompt and reply",
    )
    server.add_argument(
        "--server-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="for a local server: arguments of vLLM",
    )
    template = "for a local server: a chat template file to use instead of the model's"
    server.add_argument("--chat-template", metavar="FILE", help=template)
    server.add_argument(
        "--server-log", type=Path, metavar="FILE", help="for a local server: its log file"
    )
    server.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="concurrent requests (default: as many as fit the server's KV cache)",
    )
    kept = parser.add_argument_group("what to store")
    kept.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the result, with every task's score"
    )
    kept.add_argument(
        "--samples-file", type=Path, metavar="FILE.jsonl", help="write every reply with its grade"
    )
    kept.add_argument(
        "--cache",
        metavar="URL",
        help="a folder, s3://…: stores replies; the same command continues from them",
    )
    kept.add_argument(
        "--weights-digest",
        metavar="TEXT",
        help="with --cache and a server on this machine: the name of its weights",
    )
    kept.add_argument(
        "--prices",
        type=_prices,
        metavar="IN,OUT",
        help="dollars per million prompt and completion tokens",
    )
    kept.add_argument(
        "--confidence", type=float, default=0.95, help="level of the intervals (default: 0.95)"
    )
    add_grading(parser)
    parser.set_defaults(run_command=run_eval)


def add_grading(parser: argparse.ArgumentParser) -> None:
    """Add the options of graders, of `ttrl eval` and `ttrl replay`."""
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="run graders in separate processes, with time limits",
    )
    parser.add_argument(
        "--grader-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit of a grade (default: 60)",
    )


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        type=Path,
        nargs="+",
        metavar="RUN_OR_FILE",
        help="run folders, or two files of `ttrl eval --output`",
    )
    parser.add_argument(
        "--by",
        choices=("iteration", "flops", "tokens", "seconds"),
        default="iteration",
        help="for runs: the unit of comparison; ttrl compares up to the point that all runs "
        "reached (default: iteration)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="for runs: also write a page with curves"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="level of the intervals (default: 0.95)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run_command=run_compare)


def run_eval(arguments: argparse.Namespace) -> int:
    note("ttrl eval: checking everything first ...")
    from ttrl.evaluation.evaluate import EvalConfig, run_evaluation

    logging.getLogger("ttrl.evaluation.evaluate").setLevel(logging.INFO)
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in {field.name for field in fields(EvalConfig)}
    }
    config = EvalConfig(**given, options=dict(map(_option, arguments.option)))
    result = run_evaluation(config)
    say(
        result.table()
        + (f"\nwritten to {arguments.output}" if arguments.output is not None else "")
    )
    for name, why in result.failed.items():
        note(f"ttrl: error: {name}: {why}")
    if result.failed:
        return 2
    return 0


def run_compare(arguments: argparse.Namespace) -> int:
    if any(path.is_dir() for path in arguments.what):
        return _compare_runs(arguments)
    if len(arguments.what) != 2 or arguments.html is not None:
        raise UserError("give two files of `ttrl eval`, or run folders; --html is for runs")
    from ttrl.evaluation.comparison import compare

    comparison = compare(*arguments.what, confidence=arguments.confidence)
    say(json.dumps(comparison.to_json(), indent=1) if arguments.json else comparison.table())
    return 0


def _compare_runs(arguments: argparse.Namespace) -> int:
    from ttrl.report.compared_runs import compare_runs

    if arguments.json:
        raise UserError(
            "--json is for evaluations; for runs, ttrl prints a table and writes a page (--html)"
        )
    comparison = compare_runs(arguments.what, by=arguments.by, confidence=arguments.confidence)
    say(comparison.table())
    if arguments.html is not None:
        print(comparison.write_html(arguments.html))
    return 0


def _option(text: str) -> tuple[str, Any]:
    """Read an option: gsm8k.few_shot=4 as ("gsm8k.few_shot", 4), JSON where it is JSON, else
    text.
    """
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise UserError(f"--option {text!r}: write FAMILY.NAME=VALUE, such as gsm8k.style=r1")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _json_object(text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
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
        raise argparse.ArgumentTypeError(
            f"{text!r}: give two numbers with a comma, such as 0.15,0.60"
        ) from None
    return first, second

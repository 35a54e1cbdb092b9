"""`ttrl doctor`, `ttrl serve` and `ttrl cache`: check this machine, serve a run on another one, and
look after a cache of completions.
"""

import argparse
import logging
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ttrl.errors import UserError
from ttrl.system.console import note, say

if TYPE_CHECKING:
    from ttrl.cli.doctor import CheckResult

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    proof = (
        "also certify training on this hardware: kernels, optimizers, a learning run (3 to 15 "
        "minutes)"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--certify", action="store_true", help=proof)
    ways.add_argument(
        "--json", action="store_true", help="print the checks as JSON, such as for a bug report"
    )
    out = "path of the certificate, without .json and .html (default: ./ttrl-certificate)"
    parser.add_argument(
        "--out", type=Path, default=Path("ttrl-certificate"), metavar="FILE", help=out
    )
    model = "also check a model for training: a folder, a name of `ttrl models` or on the hub"
    parser.add_argument("--model", metavar="MODEL", help=model)
    parser.set_defaults(run_command=run_doctor)


def run_doctor(
    arguments: argparse.Namespace,
    examine: "Callable[[Path], list[CheckResult]] | None" = None,
    certify: Callable[[Path, Callable[[str], None]], bool] | None = None,
) -> int:
    """Examine this machine; return 1 if it cannot run ttrl, or a case of the certificate failed.

    examine, certify: default `ttrl.cli.doctor.examine` and `ttrl.cli.certify.certify`.
    """
    from ttrl.cli import doctor

    note(
        "Looking at this machine: importing vLLM takes 15 s, or minutes if the machine is busy ..."
    )
    checks = (examine or doctor.examine)(Path.cwd())
    if arguments.model is not None:
        checks += doctor.check_model(arguments.model)
    print(doctor.as_json(checks) if arguments.json else doctor.render(checks))
    if any(check.mark == "bad" for check in checks):
        return 1
    if not arguments.certify:
        return 0
    if certify is None:
        # Here: its imports may be missing, as doctor finds.
        from ttrl.cli import certify as certificate

        certify = certificate.certify
    if certify(arguments.out, say):
        return 0
    return 1


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model folder, a name of `ttrl models` or on the hub: the run's starting model",
    )
    host = "the address to listen on (default: 127.0.0.1, this machine only)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    parser.add_argument("--port", type=int, metavar="N", help="the port (default: a free one)")
    key_file = "the key file, created if missing (default: ~/.config/ttrl/server.key)"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=key_file)
    parser.add_argument(
        "--log",
        type=Path,
        default=Path("ttrl_serve.log"),
        metavar="FILE",
        help="vLLM's log (default: ./ttrl_serve.log)",
    )
    dtypes = ("auto", "fp32", "bf16", "float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="the run's dtype (default: auto, fp32 on CPU, bf16 on CUDA, as in a run)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="the longest sequence (default: the model's)",
    )
    adapters = "fetch a run's adapters from its mirror at this address; needs no shared file system"
    parser.add_argument("--adapters", metavar="ADDRESS", help=adapters)
    template = "a chat template file to use instead of the model's"
    parser.add_argument("--chat-template", metavar="FILE", help=template)
    vllm = "any other argument of vLLM; may be repeated"
    parser.add_argument("--vllm", action="append", default=[], metavar="NAME=VALUE", help=vllm)
    parser.set_defaults(run_command=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    from ttrl.configs.machines import auto_dtype
    from ttrl.configs.vllm_arguments import argument_problems
    from ttrl.errors import ConfigError
    from ttrl.ready_models import model_named
    from ttrl.server.chat_template import templated
    from ttrl.server.cpu import is_cpu_build
    from ttrl.server.model_folder import local_folder
    from ttrl.server.serve import serve, vllm_arguments

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    given = vllm_arguments(arguments.vllm)
    refused = argument_problems(given)
    if refused:
        raise ConfigError("--vllm", refused)
    model = model_named(arguments.model)
    if arguments.adapters is not None:
        # The same files of the hub as the run's, because their digests are compared.
        has_own = arguments.chat_template is not None
        model = str(local_folder(model, chat_template=not has_own))
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = auto_dtype(cuda=not is_cpu_build())
    with templated(model, arguments.chat_template) as folder:
        serve(
            folder,
            name=arguments.model,
            host=arguments.host,
            port=arguments.port,
            key_file=arguments.key_file or Path.home() / ".config" / "ttrl" / "server.key",
            log_path=arguments.log,
            dtype=dtype,
            max_model_len=arguments.max_model_len,
            arguments=given,
            adapters_from=arguments.adapters,
            say=say,
        )
    return 0


def add_cache(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    stats = commands.add_parser("stats", help="show the contents of a cache")
    export = commands.add_parser("export", help="write every sample of a cache as a line of JSON")
    prune = commands.add_parser("prune", help="remove samples from a cache")
    for one, run in ((stats, run_stats), (export, run_export), (prune, run_prune)):
        one.add_argument(
            "url", metavar="URL", help="a folder, or s3://bucket/folder, gs://..., az://..."
        )
        one.set_defaults(run_command=run)
    export.add_argument(
        "file", type=Path, metavar="FILE.jsonl", help="the output file; an existing one is replaced"
    )
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--older-than", metavar="TIME", help="entries older than this: 30d, 12h, 2w")
    which.add_argument("--damaged", action="store_true", help="unreadable entries")
    which.add_argument("--all", action="store_true", help="all entries")
    prune.add_argument("--dry-run", action="store_true", help="only list what would be removed")


def run_stats(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import maintenance

    say(maintenance.stats(arguments.url).as_table())
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import maintenance

    print(f"{maintenance.export(arguments.url, arguments.file):,} samples in {arguments.file}")
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import maintenance

    if arguments.older_than is None:
        older_than = None
    else:
        older_than = _age(arguments.older_than)
    print(
        maintenance.prune(
            arguments.url,
            older_than=older_than,
            damaged_only=arguments.damaged,
            dry_run=arguments.dry_run,
        )
    )
    return 0


def _age(text: str) -> timedelta:
    """Read a length of time: 30d, 12h, 45m, 90s or 2w."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())
    if match is None:
        raise UserError(f"{text!r} is not an age; give a number and s, m, h, d or w, such as 30d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})

"""`ttrl serve` and `ttrl join`: this machine as a host of somebody's run."""

import argparse
import logging
import sys
from pathlib import Path


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them, and what is called with them."""
    parser.add_argument("model", metavar="MODEL", help="a model folder, or a name on the hub: the run's starting model")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on; this machine alone without it (127.0.0.1)"
    )
    parser.add_argument("--port", type=int, metavar="N", help="without it, a free one")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="made if it is not there; without it, ~/.config/ttrl/server.key"
    )
    parser.add_argument("--log", type=Path, default=Path("ttrl_serve.log"), metavar="FILE", help="of vLLM (./ttrl_serve.log)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="must be that of the run (auto)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="the longest sequence; without it, the model's")
    parser.add_argument(
        "--vllm", action="append", default=[], metavar="NAME=VALUE", help="any other argument of vLLM; may be given several times"
    )
    parser.set_defaults(run_command=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted."""
    from ttrl.server.serve import serve, vllm_arguments

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")

    serve(
        arguments.model,
        host=arguments.host,
        port=arguments.port,
        key_file=arguments.key_file or Path.home() / ".config" / "ttrl" / "server.key",
        log_path=arguments.log,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        arguments=vllm_arguments(arguments.vllm),
        say=_say,
    )
    return 0


def add_join_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them, and what is called with them."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder, on a file system that all nodes share")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="ends when no trainer came up for so long (600)",
    )
    parser.set_defaults(run_command=_join)


def _join(arguments: argparse.Namespace) -> int:
    """Takes part until there is nothing to take part in."""
    from ttrl.launch.nodes import join

    join(arguments.run, patience=arguments.patience, say=_say)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

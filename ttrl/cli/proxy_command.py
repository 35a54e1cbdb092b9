"""`ttrl proxy`: collect the requests of agents to a model."""

import argparse
import asyncio
import contextlib
import json
from pathlib import Path

from ttrl.errors import UserError
from ttrl.system.console import Console, say


def add_proxy(parser: argparse.ArgumentParser) -> None:
    what = (
        "a model folder, a name of `ttrl models` or on the hub, or a vLLM server's address "
        "(http://…/v1)"
    )
    parser.add_argument("model", metavar="MODEL_OR_URL", help=what)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="RUN", help="the folder for the rollouts"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address to listen on (default: 127.0.0.1, this machine only)",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port (default: a free one)"
    )
    key_file = (
        "the key file for opening sessions, created if missing (default: ~/.config/ttrl/proxy.key)"
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=key_file)
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another model, not recorded",
    )
    parser.add_argument(
        "--ignore",
        default="",
        metavar="NAMES",
        help="agents' parameters to ignore: temperature,top_p",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="end a session after this time without a request (default: 600)",
    )
    parser.add_argument(
        "--turns", type=int, default=64, metavar="N", help="replies per session (default: 64)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature (default: 1)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens per reply (default: the rest of the model's context)",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="the model's name on its server (default: the first one listed)",
    )
    key = "the environment variable with the server's key (default: OPENAI_API_KEY)"
    parser.add_argument("--key-variable", default="OPENAI_API_KEY", metavar="VARIABLE", help=key)
    server = "for a local server: arguments of vLLM, as JSON"
    parser.add_argument("--server-args", type=json.loads, default={}, metavar="JSON", help=server)
    template = "for a local server: a chat template file to use instead of the model's"
    parser.add_argument("--chat-template", metavar="FILE", help=template)
    parser.set_defaults(run_command=run_proxy)


def run_proxy(arguments: argparse.Namespace) -> int:
    from ttrl.agents.proxy import Proxy
    from ttrl.configs.run import TrainConfig
    from ttrl.ready_models import model_named
    from ttrl.rollouts.request import SamplingRequest
    from ttrl.run_folder.folder import RunFolder
    from ttrl.server.chat_template import read_chat_template
    from ttrl.server.cpu import is_cpu_build
    from ttrl.server.serve import read_or_make_key
    from ttrl.server.serving import is_address, serving
    from ttrl.tasks.task import RolloutLimits

    run = arguments.output
    model = model_named(arguments.model)
    beside = dict(map(_named, arguments.beside))
    params: dict[str, float] = {"temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        params["max_tokens"] = arguments.max_tokens
    names = ("name", "key_variable", "server_args", "chat_template")
    options = {name: getattr(arguments, name) for name in names}
    if arguments.chat_template is not None:  # the run remembers the text
        options["chat_template"] = read_chat_template(arguments.chat_template)
    key_file = arguments.key_file or Path.home() / ".config" / "ttrl" / "proxy.key"
    key = read_or_make_key(key_file)
    # Model and settings for `ttrl replay --train`.
    if not is_address(model) and not RunFolder(run).config():
        config = TrainConfig(
            run=str(run),
            model=model,
            iterations=1,
            temperature=arguments.temperature,
            chat_template=options["chat_template"],
        )
        RunFolder(run).remember_config(config.resolved(cuda=not is_cpu_build()).to_dict())
    with serving(model, **options) as served:
        if served.parsers:
            say(served.parsers)
        proxy = Proxy(
            SamplingRequest(
                client=served.endpoint,
                model=served.model,
                params=params,
                weights_version=0,
                pbar=False,
            ),
            run,
            key,
            arguments.host,
            arguments.port,
            RolloutLimits(turns=arguments.turns, seconds=arguments.seconds),
            frozenset(name for name in arguments.ignore.split(",") if name),
            beside,
            names=[served.model if is_address(model) else arguments.model],
        )
        say(
            f"POST /sessions needs the key in {key_file}. Ctrl-C or SIGTERM stops the proxy and "
            "writes its sessions as an iteration."
        )
        with contextlib.suppress(KeyboardInterrupt), Console(quiet=True).interruptible(""):
            asyncio.run(proxy.serve(say))
    return 0


def _named(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not name or not equals:
        raise UserError(f"--beside {text}: write NAME=URL, such as judge=http://127.0.0.1:8001/v1")
    return name, address

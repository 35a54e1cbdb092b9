"""`ttrl models` and `ttrl chat`: models without a hub, and a conversation with any model."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrl.errors import ServerError, UserError
from ttrl.records import Endpoint
from ttrl.system.console import say

if TYPE_CHECKING:
    import openai


def add_models(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run_command=run_list)
    get = commands.add_parser("get", help="download or make a model, and print its folder")
    get.add_argument("name", metavar="NAME", help="its name in `ttrl models`")
    get.set_defaults(run_command=run_get)
    convert = commands.add_parser(
        "convert", help="convert another program's own checkpoint to a model folder"
    )
    convert.add_argument(
        "kind", metavar="KIND", choices=("nanochat",), help="the program: nanochat"
    )
    convert.add_argument(
        "path",
        metavar="PATH",
        help="a folder such as chatsft_checkpoints/d20, or a model_NNNNNN.pt",
    )
    convert.add_argument("--out", metavar="FOLDER", help="the output folder (default: models/NAME)")
    convert.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="the folder of tokenizer.pkl (default: nanochat's own)",
    )
    convert.set_defaults(run_command=run_convert)


def run_list(_: argparse.Namespace) -> int:
    from ttrl.families.table import COMPOSITES, OWN_DECODERS
    from ttrl.ready_models import READY_MODELS

    for name, model in READY_MODELS.items():
        print(f"{name:14}{model.about}\n{'':14}{model.licence}; {model.size}")
    print(
        "\nUse a name like a model folder: --model smollm2-135m. `ttrl models get NAME` prints "
        "its folder."
    )
    print("\nttrl's own decoder trains folders and hub models with one of these model_types:")
    print(f"  {', '.join([*OWN_DECODERS, *COMPOSITES])}")
    print("All of them are tested against transformers on a CPU. On one H100, the trainer ran ten")
    print("of them, and a whole run of a tiny model finished. Several GPUs are untested.")
    print("transformers' own class trains nearly all other text models: docs/reference/models.md")
    print("lists the checks, made with tiny versions on a CPU. `ttrl doctor --model MODEL` checks")
    print("whether ttrl trains a model.")
    return 0


def run_get(arguments: argparse.Namespace) -> int:
    from ttrl.ready_models import READY_MODELS, ready_model

    folder = ready_model(arguments.name)
    if folder is None:
        raise UserError(
            f"no model is called {arguments.name!r}; choose one of {', '.join(READY_MODELS)}"
        )
    print(folder)
    return 0


def run_convert(arguments: argparse.Namespace) -> int:
    from ttrl.nanochat.convert import convert

    source = Path(arguments.path).expanduser()
    if source.is_dir():
        name = source.name
    else:
        name = source.parent.name
    out = Path(arguments.out or Path("models", f"nanochat-{name}"))
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not empty; choose another folder with --out")
    print(convert(source, out, arguments.tokenizer))
    return 0


def add_chat(parser: argparse.ArgumentParser) -> None:
    model = (
        "a checkpoint or another model folder, a name of `ttrl models` or on the hub, or a "
        "server's address (http://…/v1)"
    )
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument(
        "--system-prompt", "--system", dest="system", metavar="TEXT", help="a system message"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0 for the likeliest words (default: 0)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="tokens per reply (default: 512)"
    )
    parser.add_argument(
        "--dtype", help="the server's dtype: fp32, bf16, auto (default: auto, fp32 on CPU)"
    )
    parser.set_defaults(run_command=run_chat)


def run_chat(
    arguments: argparse.Namespace, read_line: Callable[[], str | None] | None = None
) -> int:
    """Hold a conversation: a line of standard input is a message, an empty one starts over, the end
    of the input ends it. read_line: returns the next line; None at the end.
    """
    read_line = read_line or _read_line
    import openai

    from ttrl.ready_models import ready_model
    from ttrl.server.model_folder import check_model_folder
    from ttrl.server.serving import is_address, serving

    start: list[Any]
    if arguments.system:
        start = [{"role": "system", "content": arguments.system}]
    else:
        start = []
    model = str(ready_model(arguments.model) or arguments.model)
    if not is_address(model):
        check_model_folder(model)
        print("Starting a server (half a minute on a CPU) ...", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(model, dtype=arguments.dtype))
        client = stack.enter_context(client_of(served.endpoint))
        print("An empty line starts a new conversation, Ctrl-D ends.", file=sys.stderr, flush=True)
        messages = list(start)
        while (text := read_line()) is not None:
            if not text:
                messages = list(start)
                continue
            messages.append({"role": "user", "content": text})
            reply = ""
            try:
                with client.chat.completions.create(
                    model=served.model,
                    messages=messages,
                    temperature=arguments.temperature,
                    max_tokens=arguments.max_tokens,
                    stream=True,
                ) as pieces:
                    for piece in pieces:
                        if piece.choices:
                            part = piece.choices[0].delta.content or ""
                        else:
                            part = ""
                        reply += part
                        say(part, end="")
            except openai.OpenAIError as error:
                raise ServerError(f"{served.model} did not answer: {error}") from error
            print(flush=True)
            messages.append({"role": "assistant", "content": reply})
    return 0


def client_of(endpoint: Endpoint) -> "openai.OpenAI":
    """Return openai's client of a server; a proxy from the environment never gets the key of our
    own servers.
    """
    import openai

    return openai.OpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        default_headers=dict(endpoint.headers),
        http_client=openai.DefaultHttpxClient(trust_env=endpoint.uses_proxy),
    )


def _read_line() -> str | None:
    """Return the person's next line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None

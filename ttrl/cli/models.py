"""Commands on models: `ttrl models` gets them without a hub, `ttrl chat` talks to one, `ttrl push`
and `ttrl export` hand on a run's.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrl.errors import ServerError, UserError
from ttrl.records import Endpoint
from ttrl.system.console import note, say
from ttrl.text import gib, harmless

if TYPE_CHECKING:
    import openai

_RUN = "a run folder, such as runs/sort_letters, or a checkpoint in it"


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
    if out.is_dir() and any(out.iterdir()):
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

    from ttrl.ready_models import model_named
    from ttrl.server.model_folder import check_model_folder
    from ttrl.server.serving import is_address, serving

    start: list[Any] = []
    if arguments.system:
        start.append({"role": "system", "content": arguments.system})
    model = model_named(arguments.model)
    if not is_address(model):
        check_model_folder(model)
        note("Starting a server (half a minute on a CPU) ...")
    with (
        serving(model, dtype=arguments.dtype) as served,
        client_of(served.endpoint) as client,
    ):
        note("An empty line starts a new conversation, Ctrl-D ends.")
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
                        for choice in piece.choices:
                            part = choice.delta.content or ""
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


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    parser.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="the checkpoint after iteration N (default: the best by validation_metric; without "
        "held-out tasks, the newest)",
    )


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Push a run's checkpoint to the hub, with a model card made from the run. Uses HF_TOKEN or "
        "the login of `hf auth login`."
    )
    _add_choice(parser)
    parser.add_argument("--to", required=True, metavar="USER/NAME", help="the repository")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the card and the files; ask no network"
    )
    parser.add_argument(
        "--public", action="store_true", help="make a new repository public (default: private)"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="also into a repository with other files, and remove those",
    )
    parser.add_argument(
        "--merged", action="store_true", help="push whole weights instead of an adapter"
    )
    parser.add_argument(
        "--base-model", metavar="USER/NAME", help="the starting model's name on the hub"
    )
    parser.set_defaults(run_command=run_push)


def run_push(arguments: argparse.Namespace) -> int:
    note(f"ttrl push: reading {arguments.run}")
    from ttrl.exports.checkpoint import choose
    from ttrl.exports.push import package, push

    chosen = choose(arguments.run, arguments.iteration)
    made = package(chosen, arguments.to, base_model=arguments.base_model, merged=arguments.merged)
    if arguments.dry_run:
        say(harmless(made.card))
        note(f"{made.listing()}\n(nothing was sent)")
        return 0
    note(made.listing())
    print(push(made, public=arguments.public, replace=arguments.replace))
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a run's checkpoint for llama.cpp and Ollama: a GGUF file and a Modelfile. An "
        "adapter is merged into its base first."
    )
    _add_choice(parser)
    parser.add_argument("--to", required=True, choices=("gguf",), help="the format: gguf")
    parser.add_argument(
        "--dtype",
        choices=("f32", "bf16", "f16", "q8_0"),
        help="of the matrices; q8_0: 8 bits (default: as in the checkpoint)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="the folder to write (default: exports/NAME)"
    )
    parser.set_defaults(run_command=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("gguf") is None:
        raise UserError("writing GGUF files needs the package gguf: pip install gguf")
    note(f"ttrl export: reading {arguments.run}")
    from ttrl.exports.checkpoint import choose
    from ttrl.exports.gguf import export_gguf

    chosen = choose(arguments.run, arguments.iteration)
    output = arguments.output or Path("exports", chosen.name)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose a folder with --output")
    note(f"iteration {chosen.iteration}, {chosen.why}")
    made = export_gguf(chosen, output, arguments.dtype)
    for path in made:
        print(path)
    note(f"({gib(made[0].stat().st_size)}; in {output}: ollama create {chosen.name} -f Modelfile)")
    return 0

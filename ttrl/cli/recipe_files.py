"""`ttrl recipes`, `ttrl quickstart` and `ttrl pack`: the files of recipes/ and recipe_configs/, in
a clone or as installed, and packs for the trainer without a run.
"""

import argparse
import ast
import difflib
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ttrl.errors import ModelFolderError, UserError
from ttrl.system.console import note
from ttrl.text import harmless

_HOME = Path(__file__).resolve().parents[2]
"""A clone, or site-packages."""
_INSTALLED = (
    _HOME / "share" / "ttrl",  # pip install --target
    _HOME / ".." / ".." / ".." / "share" / "ttrl",  # a virtual environment, a user's packages
)
"""Where a wheel may have put the two folders."""
_MODEL = "smollm2-135m"


def recipes() -> dict[str, Path]:
    """Return the recipes by their names; none if ttrl was installed without them."""
    return _files("recipes", "*.py")


def recipe_configs() -> dict[str, Path]:
    """Return the trainer's configs by their names; none if ttrl was installed without them."""
    return _files("recipe_configs", "*.yaml")


def sweeps() -> dict[str, Path]:
    """Return the sweeps by their names; none if ttrl was installed without them."""
    return _files("recipes/sweeps", "*.yaml")


def _files(folder: str, pattern: str) -> dict[str, Path]:
    if (_HOME / "pyproject.toml").is_file():
        places: tuple[Path, ...] = (_HOME,)
    else:
        places = _INSTALLED  # torchtune has a folder recipes/ in site-packages
    for parent in places:
        paths = sorted(Path(parent, folder).resolve().glob(pattern))
        found = {path.stem: path for path in paths}
        if found:
            return found
    return {}


def add_settings(
    parser: argparse.ArgumentParser, about: str, option: str = "--set", form: str = "NAME=VALUE"
) -> None:
    """Add an option for settings; it may be repeated."""
    parser.add_argument(option, nargs="+", action="extend", default=[], metavar=form, help=about)


def add_recipes(parser: argparse.ArgumentParser) -> None:
    name = "a recipe, a sweep or a config; prints its path (default: list all)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    copy = "copy the file into a folder (default: this one), to change it"
    parser.add_argument("--copy", nargs="?", type=Path, const=Path(), metavar="FOLDER", help=copy)
    parser.set_defaults(run_command=run_recipes)


def run_recipes(arguments: argparse.Namespace) -> int:
    """List the recipes, sweeps and configs, or print or copy the file of one."""
    if arguments.name is None:
        if arguments.copy is not None:
            raise UserError("--copy needs a name: ttrl recipes gsm8k --copy")
        print("Recipes, for `ttrl train NAME`:\n")
        print(_table({name: _about(path) for name, path in recipes().items()}))
        print("\nSweeps, for `ttrl sweep NAME`:\n")
        print(_table({name: _first_comment(path) for name, path in sweeps().items()}))
        print("\nConfigs, for `tune run ttrl/grpo_recipe --config FILE`:\n")
        print(_table({name: _first_comment(path) for name, path in recipe_configs().items()}))
        print("\n`ttrl recipes NAME` prints the path of a file; with --copy it copies the file.")
        return 0
    path = _named(arguments.name)
    if arguments.copy is None:
        print(path)
        return 0
    target = copied(path, arguments.copy)
    print(target)
    if target.suffix == ".py":
        print(f"Next: ttrl train {harmless(str(target))} --check")
    return 0


def copied(path: Path, folder: Path) -> Path:
    """Copy a file into a folder, and return the copy. Raises UserError if it cannot be made, and
    rather than replace a file.
    """
    target = folder / path.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, target.open("xb") as copy:
            shutil.copyfileobj(source, copy)
    except FileExistsError as error:
        raise UserError(
            f"{error.filename} exists; remove it, or copy elsewhere: --copy FOLDER"
        ) from error
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from error
    return target


def _named(name: str) -> Path:
    known = recipes() | sweeps() | recipe_configs()
    if name.replace("-", "_") in known:
        return known[name.replace("-", "_")]
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = "`ttrl recipes` lists all"
    raise UserError(f"there is no recipe, sweep or config {name!r}; {hint}")


def _table(lines: Mapping[str, str]) -> str:
    width = max(map(len, lines), default=0) + 2
    return "\n".join(f"  {name:{width}}{line}" for name, line in lines.items())


def _about(recipe: Path) -> str:
    """Return the first paragraph of a recipe's docstring, as far as a line of a list holds it."""
    text = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    return textwrap.shorten(text.partition("\n\n")[0], 100, placeholder=" …")


def _first_comment(config: Path) -> str:
    with config.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()


def add_quickstart(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Teach a small chat model to answer in JSON, in 6 to 12 minutes on two cores. If the model "
        "cannot be downloaded, a tiny one learns to sort letters. The same command continues."
    )
    parser.epilog = "Other options go to the recipe: --seed 1, --iterations 4, --run runs/second."
    tiny = "download nothing: a model of a million parameters learns to sort letters"
    parser.add_argument("--tiny", action="store_true", help=tiny)
    parser.set_defaults(run_command=run_quickstart, takes_others=True)


def run_quickstart(arguments: argparse.Namespace) -> NoReturn:
    """Become the recipe of the quickstart, or of the tiny one."""
    if _names_model(arguments.others):
        if arguments.tiny:
            raise UserError("--tiny makes a model of its own; leave it out, or the model")
        name = "structured_output"
    elif arguments.tiny:
        name = "sort_letters"
    else:
        name = _quickstart_recipe()
    known = recipes()
    if name not in known:
        raise UserError(f"the recipe {name} is not installed; install ttrl again")
    become(known[name], arguments.others)


def _names_model(options: Sequence[str]) -> bool:
    """Tell whether options of a recipe choose a model."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--set", nargs="*", action="extend", default=[])
    given, _ = parser.parse_known_args(options)
    return given.model is not None or any(text.startswith("model=") for text in given.set)


def _quickstart_recipe() -> str:
    from ttrl.ready_models import ready_model

    try:
        ready_model(_MODEL)
    except ModelFolderError as error:
        note(f"ttrl: {error}")
        note("So a tiny model is trained instead: ttrl quickstart --tiny")
        return "sort_letters"
    return "structured_output"


def become(script: Path, options: Sequence[str]) -> NoReturn:
    """Run a script in place of this process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *options])


def add_pack(parser: argparse.ArgumentParser) -> None:
    files = "rollouts.jsonl of a run, or the lines of TaskResults.to_jsonl_lines()"
    parser.add_argument("rollouts", nargs="+", type=Path, metavar="ROLLOUTS.jsonl", help=files)
    model = "the sampling model: a folder, a name of `ttrl models` or on the hub"
    parser.add_argument("--model", required=True, metavar="MODEL", help=model)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the output, such as packed.safetensors; an existing file is replaced",
    )
    config = "settings of a run or of a recipe: a YAML file, or a run folder (default: none)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    add_settings(
        parser, "settings to use instead: seq_len=4096 advantages=leave_one_out objective=gspo"
    )
    parser.set_defaults(run_command=run_pack)


def run_pack(arguments: argparse.Namespace) -> int:
    """Pack the rollouts, and print the facts and the command for the next step."""
    from ttrl.cli.settings import model_run, read_planned
    from ttrl.loop.pack_files import pack_files

    settings = ["max_tokens=1", *arguments.set]  # nothing is sampled: short rows are fine
    if arguments.config is None:
        config = model_run(arguments.model, settings)
    else:
        settings.append(f"model={json.dumps(arguments.model)}")
        config = read_planned(arguments.config, settings, with_tasks=False).config
    made = pack_files(arguments.rollouts, config, arguments.out)
    print(harmless("\n".join(made.lines())))
    command = ["tune", "run", "ttrl/grpo_recipe", "--config", "CONFIG.yaml"]
    command += [f"model={arguments.model}", f"packed={arguments.out}", "output_dir=FOLDER"]
    if made.temperature != 1.0:
        command.append(f"temperature={made.temperature}")
    print(f"Next: {shlex.join(command)}")
    return 0

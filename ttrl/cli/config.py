"""Explain one setting (`ttrl config NAME`), or print all of them (docs/reference/settings.md)."""

import argparse
import difflib
from typing import Any

from ttrl.errors import UserError

_ABOUT = """# Settings

Every setting of a run, of the recipes and of an evaluation: name, type, default, meaning. `ttrl
config` makes this page from the source (`ttrl config > docs/reference/settings.md`). `ttrl config
NAME` explains one setting, `help(ttrl.TrainConfig)` all settings of a class. ttrl lists all
mistakes in a config at once, before anything starts."""


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="such as max_tokens, lr or training.lr (all, as a page)",
    )
    parser.set_defaults(run_command=run_config)


def run_config(arguments: argparse.Namespace) -> int:
    """Print the meaning of a setting, for every class with it."""
    from ttrl.configs import GRPOConfig, SFTConfig
    from ttrl.configs.recipe import OTHER_NAMES
    from ttrl.configs.run import TrainConfig
    from ttrl.configs.settings_reference import as_markdown, settings_of
    from ttrl.evaluation.evaluate import EvalConfig
    from ttrl.registries import LOGGERS, OBJECTIVES, Registry

    classes: list[tuple[str, type]] = [
        ("A run: `ttrl.TrainConfig(…)`", TrainConfig),
        ("The GRPO recipe: `TrainConfig(training=ttrl.GRPOConfig(…))`", GRPOConfig),
        ("The supervised recipe: `tune run ttrl/sft_recipe`", SFTConfig),
        ("An evaluation: `ttrl.evaluate(…)`, `ttrl eval`", EvalConfig),
    ]
    if arguments.name is None:
        print(as_markdown(_ABOUT, classes), end="")
        return 0
    name = arguments.name.removeprefix("training.").replace("-", "_")
    found = [
        (title, one.text())
        for title, cls in classes
        for one in settings_of(cls)
        if one.name == name
    ]
    if not found:
        known = sorted({one.name for _, cls in classes for one in settings_of(cls)})
        if name in OTHER_NAMES:
            near = [OTHER_NAMES[name]]
        else:
            near = difflib.get_close_matches(name, known, n=3)
        if near:
            hint = f"; did you mean {' or '.join(near)}?"
        else:
            hint = "; `ttrl config` lists all"
        raise UserError(f"no setting is called {arguments.name!r}{hint}")
    for text in dict.fromkeys(text for _, text in found):
        print("\n".join([*(title for title, other in found if other == text), f"  {text}"]))
    registries: dict[str, Registry[Any]] = {"objective": OBJECTIVES, "loggers": LOGGERS}
    if name in registries:
        known = registries[name].names()
        others = [one for one in known if not registries[name].is_own(one)]
        print(f"  Of other packages here: {', '.join(others) or 'none'}")
    return 0

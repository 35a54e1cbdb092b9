"""`ttrl plan`: plan the needs of a run, a config, a model, a script or a recipe."""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttrl.cli.recipe_files import add_settings, become, recipes
from ttrl.errors import ConfigError, UserError, complaints
from ttrl.system.console import note

if TYPE_CHECKING:
    from ttrl.configs.run import TrainConfig
    from ttrl.plans.plan import Plan
    from ttrl.tasks.task import Task

_PLAN = """Predict a run's memory, disk, FLOPs, time and cost.

    ttrl plan Qwen/Qwen3-4B --gpu 1x24GB     a model: on the hub, of `ttrl models`, or a folder
    ttrl plan structured_output              a recipe by its name
    ttrl plan my_task.py --seed 1            a script; `ttrl tasks new` writes one
    ttrl plan run.yaml --set lora_rank=16    a file of settings, as for `ttrl train`
    ttrl plan runs/NAME                      a run, with its measured lengths and times

All other options go to the script or recipe. For a model, ttrl plans one iteration with the
defaults of `ttrl config`; --set changes them."""


@dataclass(frozen=True)
class PlanOptions:
    """Hold the options for making and printing a plan. Scripts get them as JSON (`--plan JSON`)."""

    gpu: str | None = None
    probe: bool = False
    price_per_hour: float | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    signal_share: float | None = None
    json: bool = False

    @classmethod
    def parse(cls, text: str) -> "PlanOptions":
        """Read the text after a script's --plan."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(
                f"{text!r}: --plan takes no value; `ttrl plan SCRIPT` has other ways to plan"
            ) from None

    def plan(
        self,
        config: "TrainConfig",
        tasks: Sequence["Task"] = (),
        validation_tasks: Sequence["Task"] = (),
        *,
        recipe_only: bool = False,
        run: Path | None = None,
    ) -> "Plan":
        """Plan a run. Raises the errors of `ttrl.plan`."""
        from ttrl.loop.run_plan import plan  # loads PyTorch
        from ttrl.plans.expected_lengths import Assumptions

        return plan(
            config,
            tasks,
            validation_tasks,
            assumptions=Assumptions(self.prompt_tokens, self.completion_tokens, self.signal_share),
            gpu=self.gpu,
            probe=self.probe,
            price_per_hour=self.price_per_hour,
            recipe_only=recipe_only,
            run=run,
        )

    def text(self, made: "Plan") -> str:
        """Write a plan for a person, or as JSON."""
        if self.json:
            return json.dumps(made.to_dict(), indent=2)
        return str(made)


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = _PLAN
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = (
        "a model, a recipe, a script, a run folder, or a file of settings (such as one of "
        "recipe_configs/)"
    )
    parser.add_argument("config", metavar="WHAT", help=what)
    others = "settings to use instead: model=FOLDER iterations=100 lora_rank=16"
    add_settings(parser, others, form="KEY=VALUE")
    parser.add_argument(
        "--tasks",
        metavar="FILE.py",
        help="also FILE.py:NAME or MODULE:NAME: count the prompts of these tasks",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help="mean prompt length, if there are no tasks (default: 200)",
    )
    parser.add_argument(
        "--completion-tokens",
        type=float,
        metavar="N",
        help="mean completion length (default: a third of max_tokens)",
    )
    parser.add_argument(
        "--signal-share",
        type=float,
        metavar="S",
        help="share of groups with a signal (default: 1)",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="start server and trainer, and measure a few iterations",
    )
    which = "plan for this GPU, by its data sheet: H100, 8xH100, 4090, A100-40GB, 2x24GB, ..."
    parser.add_argument("--gpu", metavar="NAME", help=which)
    parser.add_argument(
        "--price-per-hour", type=float, metavar="P", help="price of the whole machine"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run_command=run_plan, takes_others=True)


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan the named thing, or become the script; it plans itself."""
    note(f"ttrl plan: reading {arguments.config}")
    names = [one.name for one in dataclasses.fields(PlanOptions)]
    how = PlanOptions(**{name: getattr(arguments, name) for name in names})
    script = _script(arguments.config)
    if script is not None:
        return _plan_script(script, arguments, how)
    if arguments.others:
        others = " ".join(arguments.others)
        raise UserError(f"`ttrl plan` has no such option unless you plan a script: {others}")
    from ttrl.cli.settings import Planned, model_run, read_planned
    from ttrl.tasks.reference import load_tasks

    own = arguments.tasks is None
    try:
        if Path(arguments.config).exists() or arguments.config.endswith((".yaml", ".yml", ".json")):
            given = {"elsewhere": arguments.gpu is not None, "with_tasks": own}
            asked = read_planned(Path(arguments.config), arguments.set, **given)
        else:
            _check_name(arguments.config)
            asked = Planned(model_run(arguments.config, arguments.set))
    except ConfigError as error:
        if own:
            raise
        of_tasks = complaints(lambda: load_tasks(arguments.tasks, 1, split="train"))
        raise ConfigError(error.where, error.problems + of_tasks) from error
    if not own:
        count = asked.config.tasks_per_iteration * asked.config.iterations
        tasks = load_tasks(arguments.tasks, count, split="train")
        asked = dataclasses.replace(asked, run=None, tasks=tasks)
    plan = how.plan(
        asked.config,
        asked.tasks,
        asked.validation_tasks,
        recipe_only=asked.recipe_only,
        run=asked.run,
    )
    print(how.text(plan))
    return 0


def _script(what: str) -> Path | None:
    """Return the script or recipe of this name, if it is one. Raises UserError for a script ttrl
    cannot run.
    """
    from ttrl.cli.runs import script_named

    is_recipe = what.replace("-", "_") in recipes() and not Path(what).exists()
    if is_recipe or what.endswith(".py"):
        return script_named(what)
    return None


def _plan_script(script: Path, arguments: argparse.Namespace, how: PlanOptions) -> int:
    """Become a self-planning script; does not return. Raises UserError for a script that would
    train instead.
    """
    if arguments.tasks is not None:
        raise UserError(
            f"--tasks {arguments.tasks}: {script} has tasks of its own; leave --tasks out"
        )
    if "script_arguments(" not in script.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"{script} reads no options, and would start training. Build it on script_arguments() "
            "and run_recipe(), like the output of `ttrl tasks new`, or call ttrl.plan(config, "
            "tasks) in it"
        )
    options = list(arguments.others)
    if arguments.set:
        options += ["--set", *arguments.set]
    become(script, [*options, "--plan", json.dumps(dataclasses.asdict(how))])


def _check_name(name: str) -> None:
    """Raise UserError for a name that is neither a model's nor anything else with a plan."""
    from ttrl.ready_models import READY_MODELS, is_ready

    if is_ready(name) or name.count("/") == 1:
        return
    known = [*READY_MODELS, *recipes()]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UserError(
        f"nothing is called {name!r}{hint}; give a run folder, a file of settings, a script, a "
        f"model folder, a name on the hub (ORG/NAME), or one of {', '.join(known)}"
    )

"""Compare arms from one checkpoint at equal FLOPs: reinforcement learning, further supervised
training, and other named arms.

    RUN/start/          supervised training until good enough held-out answers; all arms start here
    RUN/RL-0/           a run, for each seed
    RUN/SFT-lr/         the search for SFT's learning rate, after the first run
    RUN/SFT-0/          supervised training, on as many FLOPs as RL-0 took
    RUN/NAME-0/         a further arm: the run, or SFT, with other settings
    RUN/compare.html    the report (`ttrl.report.compared_runs`), written again after each seed

Each is a run folder, so the same call continues after an interruption. An iteration of a
supervised run is a piece of it, with the held-out tasks at its end. The pieces of SFT end at the
FLOPs of its steps, B·3f each (B: tokens of a step, f: FLOPs of a token's forward pass), nearest to
RL's spending after some of its iterations, on reading prompts, writing answers, passes before its
updates, and forward and backward passes: N = ΣF / (B·3f) steps in all, within half a step.

SFT's learning rate is the best of three by the loss of held-out examples. Each is tried on as many
FLOPs as the arm has, as a longer training wants a lower rate and may overfit. Those FLOPs are
reported, and count for no arm.

Supervised training takes over the run's dtype and GPUs (`ttrl.plans.supervised`). Settings and
memory of all arms are checked before the first one starts.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.cli.plan_command import PlanOptions
from ttrl.cli.recipe_files import add_settings
from ttrl.cli.recipe_script import rough_plan, run_recipe
from ttrl.cli.settings import sft_settings_in, with_settings
from ttrl.configs import SFTConfig
from ttrl.configs.base import Settings
from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, UserError
from ttrl.evaluation.comparison import compare_seeds, heads
from ttrl.evaluation.eval_results import read_result
from ttrl.evaluation.evaluate import EvalConfig, checked_sets, evaluate
from ttrl.loop.checks import checked
from ttrl.loop.start import train
from ttrl.plans.open_choices import choose
from ttrl.plans.open_settings import as_begun
from ttrl.plans.plan import Plan
from ttrl.plans.supervised import (
    ArmsPlan,
    Hardware,
    Supervised,
    fit_supervised,
    setting_problems,
    sft_settings,
    shape_of,
    start_settings,
)
from ttrl.report.compared_runs import RunComparison, compare_runs
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console, note
from ttrl.tasks.task import Task
from ttrl.text import counted, duration, si_spaced

RL = "RL"
SFT = "SFT"
_SEARCH = "SFT-lr"
_OF_SFT = "sft."
"""Prefix of SFT's settings in --arm."""
_RATES = (1 / 3, 1.0, 3.0)
"""Learning rates of SFT that are tried, times the recipe's."""
_SEEDS = 5
"""Seeds that tell arms apart: of tiny models by default, of others in plans."""

Sets = str | Mapping[str, Sequence[Task]]
"""Held-out sets as `evaluate` takes them: families as text, or tasks by name."""


@dataclass(frozen=True)
class Arms:
    """Hold the arms by their names."""

    runs: Mapping[str, TrainConfig]
    """Of reinforcement learning; the first one is `RL`."""
    supervised: Mapping[str, Supervised]
    """At equal FLOPs; the first one is `SFT`."""
    rates: Sequence[float] = ()
    """Learning rates of SFT to try; none if the user gave one."""
    open_rates: frozenset[str] = frozenset()
    """Arms of SFT that take the best of these."""

    def with_rate(self, rate: float) -> "Arms":
        """Return the arms with the learning rate that was found."""
        found = dict(self.supervised)
        for name in self.open_rates:
            one = found[name]
            found[name] = dataclasses.replace(one, settings={**one.settings, "lr": rate})
        return dataclasses.replace(self, supervised=found, rates=(), open_rates=frozenset())

    @property
    def rl(self) -> TrainConfig:
        """Return the run that sets the FLOPs."""
        return self.runs[RL]


def arm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_arms`."""
    seeds = f"number of seeds, counted from --seed (default: 1 with --model, else {_SEEDS})"
    parser.add_argument("--seeds", type=int, help=seeds)
    parser.add_argument(
        "--points",
        type=int,
        default=2,
        help="number of SFT checkpoints to evaluate on the held-out tasks (default: 2)",
    )
    families = 'held-out sets for the end, as in `ttrl eval --tasks` ("": none)'
    parser.add_argument("--sets", metavar="LIST", help=families)
    parser.add_argument("--sets-n", type=int, metavar="N", help="at most so many tasks of each set")
    own = "settings of SFT: lr=1e-5 batch_size=32; without lr, held-out loss chooses among three"
    add_settings(parser, own, "--sft")
    further = "a further arm: RL with other settings, or SFT (sft.lr=1e-4); may be repeated"
    parser.add_argument(
        "--arm",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "SETTING=VALUE"),
        help=further,
    )


def run_arms(
    arguments: argparse.Namespace,
    config: TrainConfig,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    *,
    start: Supervised,
    sft: Supervised,
    sets: Sets,
) -> str:
    """Train all arms with all seeds and compare them; return the comparison. With --check, only
    check; with --plan, plan RL, and SFT with it.

    config: RL's; `model` is the model before the start. Raises the errors of `train`, `tune` and
    `evaluate`.
    """
    config, problems = with_settings(config, arguments.set)
    if arguments.seeds is None:
        arguments.seeds = 1 if arguments.model else _SEEDS
    if not held_out:
        raise UserError("there are no held-out tasks to compare arms on; give more data")
    if arguments.seeds < 1 or arguments.points < 1:
        raise UserError("--seeds and --points must be at least 1")
    arms, found = _arms(arguments, config, sft, problems)
    problems += found
    config = dataclasses.replace(config, run=str(Path(arguments.run, f"{RL}-{arguments.seed}")))
    problems += setting_problems("start", start_settings(config, start.settings, cuda=False))
    for name, one in arms.supervised.items():
        problems += setting_problems(name, sft_settings(config, one.settings))
    checked(config, tasks, held_out, model=False, problems=problems)
    asked: PlanOptions | None = arguments.plan
    if arguments.check and asked is not None:  # without a run, and perhaps without its model
        made = rough_plan(arguments, config, tasks, held_out)
        said = asked.text(made)
        return said if asked.json else f"{said}\n\n{_costs(made, arms, arguments.seeds)}"
    if arguments.check:
        return run_recipe(arguments, config, tasks, held_out, "")
    planned = _planned(arguments, arms, start)
    if asked is not None:
        said = run_recipe(arguments, config, tasks, held_out, "")
        made = Plan.load(Path(config.run))
        costs = _costs(made, arms, arguments.seeds)
        return said if asked.json else f"{said}\n\n{costs}\n\n{planned}"
    _check(planned)
    sets = sets if arguments.sets is None else arguments.sets
    if sets:
        checked_sets(EvalConfig(model=config.model, tasks=sets, n=arguments.sets_n, pbar=False))
    with Console().interruptible(f"the same command continues {arguments.run}"):
        return _run_arms(arguments, arms, tasks, held_out, start, sets)


def _arms(
    arguments: argparse.Namespace, config: TrainConfig, sft: Supervised, known: Sequence[str]
) -> tuple[Arms, list[str]]:
    """Return the arms of the command line, and the faults of their settings, without those `known`
    of RL. Raises UserError for a wrong name, and for an arm without held-out tasks.
    """
    runs = {RL: config}
    given, problems = sft_settings_in(arguments.sft)
    problems = [f"--sft: {problem}" for problem in problems]
    rates: list[float] = []
    searched: list[str] = []
    if "lr" not in given:
        searched.append(SFT)
        usual = sft.settings.get("lr", SFTConfig.lr)
        rates = [float(f"{usual * times:.2g}") for times in _RATES]
    sft = dataclasses.replace(sft, settings={**sft.settings, **given})
    supervised = {SFT: sft}
    for name, *changes in arguments.arm:
        plain = name.replace("-", "").replace("_", "")
        if name in ("start", *runs, *supervised) or not plain.isalnum():
            raise UserError(
                f"--arm {name}: choose another name of letters, digits and dashes; {RL} and {SFT} "
                "are taken"
            )
        own = [text.removeprefix(_OF_SFT) for text in changes if text.startswith(_OF_SFT)]
        if own and len(own) < len(changes):
            raise UserError(
                f"--arm {name}: an arm is RL or SFT, and these are settings of both; give two arms"
            )
        if own:
            given, found = sft_settings_in(own)
            if "lr" not in given and rates:
                searched.append(name)
            supervised[name] = dataclasses.replace(sft, settings={**sft.settings, **given})
        else:
            runs[name], found = with_settings(config, changes)
        problems += [f"--arm {name}: {problem}" for problem in found if problem not in known]
    if any(one.overfit is not None for one in runs.values()):
        raise UserError("overfit leaves no held-out tasks to compare arms on; leave it out")
    return Arms(runs, supervised, rates, frozenset(searched)), problems


def _run_arms(
    arguments: argparse.Namespace,
    arms: Arms,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    start: Supervised,
    sets: Sets,
) -> str:
    from ttrl.loop.equal_flops import EqualFlops, made_start  # loads PyTorch

    run = Path(arguments.run)
    hardware = Hardware.of(arms.rl)
    served = _served(arms.rl, hardware)
    model = made_start(run / "start", arms.rl, start, hardware, served, held_out)
    sampled = {**_how(served), "n": arguments.sets_n}
    _ask_sets(model, sets, sampled, run / "start" / "sets.json")
    folders: list[tuple[str, Path]] = []
    searches = bool(arms.rates)
    searched: list[list[str]] = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for name, settings in arms.runs.items():
            folder = run / f"{name}-{seed}"
            own = dataclasses.replace(settings, run=str(folder), seed=seed, model=str(model))
            result = train(own, tasks=tasks, validation_tasks=held_out)
            _ask_sets(result.checkpoint, sets, sampled, folder / "sets.json")
            folders.append((name, folder))
            if name != RL:
                continue
            equal = EqualFlops(folder, arms.rl, hardware, served, held_out, searches)
            if arms.rates:
                rate, searched = equal.search(arms.supervised[SFT], arms.rates, run / _SEARCH)
                arms = arms.with_rate(rate)
            for other, sft in arms.supervised.items():
                folders.append((other, run / f"{other}-{seed}"))
                checkpoint = equal.train(sft, folders[-1][1], arguments.points)
                _ask_sets(checkpoint, sets, sampled, folders[-1][1] / "sets.json")
        compared = dataclasses.replace(_compared(folders, sets), searched=searched)
        page = compared.write_html(run / "compare.html")
    return f"{compared.table()}\n{page}"


def _how(config: TrainConfig) -> Settings:
    """Return a run's settings for further held-out sets, as settings of `evaluate`."""
    return {
        "max_tokens": config.max_tokens,
        "dtype": config.dtype,
        "max_model_len": config.context,
        "server_args": {
            name: value for name, value in config.server.items() if name != "max_model_len"
        },
        "chat_template": config.chat_template,
    }


def supervised_first(
    arguments: argparse.Namespace,
    config: TrainConfig,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    start: Supervised,
) -> TrainConfig:
    """Return the run's config with the model from supervised training in RUN/start.

    With --check, --plan and --tiny nothing is trained, and the config stays as it is; a plan
    begins with this training's steps and memory. Raises the errors of `run_recipe` and
    `supervised_run`.
    """
    if arguments.tiny:
        note("--tiny leaves out the supervised training before the run")
        return config
    own, problems = with_settings(config, arguments.set)
    given, wrong = sft_settings_in(getattr(arguments, "sft", ()))
    wrong = [f"--sft: {problem}" for problem in wrong]
    start = dataclasses.replace(start, settings={**start.settings, **given})
    wrong += setting_problems("start", start_settings(own, start.settings, cuda=False))
    if wrong or not (arguments.check or arguments.plan):
        checked(own, tasks, held_out, model=not arguments.check, problems=problems + wrong)
    asked: PlanOptions | None = arguments.plan
    if asked is not None:
        # JSON is for programs, and has the run's plan only.
        print(_announced(start), file=sys.stderr if asked.json else sys.stdout)
    if arguments.check or problems:
        return config
    planned = _planned(arguments, Arms({RL: own}, {}), start)
    if asked is not None:
        print(f"{planned}\n", file=sys.stderr if asked.json else sys.stdout)
        return config
    _check(planned)
    from ttrl.loop.equal_flops import made_start  # loads PyTorch

    hardware = Hardware.of(own)
    served = _served(own, hardware)
    run = Path(arguments.run)
    with Console().interruptible(f"the same command continues {run}"):
        model = made_start(run / "start", own, start, hardware, served, held_out)
    return dataclasses.replace(config, model=str(model))


def _announced(start: Supervised) -> str:
    """Describe the training before a run, for its plan."""
    size = start.settings.get("batch_size", SFTConfig.batch_size)
    text = f"before the run: up to {start.marks[-1]} supervised steps of {size} conversations"
    if start.stop_at is not None:
        text += f", until held-out {start.metric} reaches {start.stop_at:g}"
    return f"{text}; the plan's times and costs are those of the run alone"


def _planned(arguments: argparse.Namespace, arms: Arms, start: Supervised) -> ArmsPlan:
    """Plan the arms of the first seed; arms already begun keep their settings."""
    run = Path(arguments.run)
    config = arms.rl
    hardware = Hardware.of(config)
    model = shape_of(config)
    runs = {}
    for name, settings in arms.runs.items():
        if settings.cluster is None:  # otherwise its machines decide, once the run is there
            folder = run
            if arms.supervised:
                folder = run / f"{name}-{arguments.seed}"
            begun = as_begun(settings, RunFolder(folder).config())
            runs[name] = choose(model, begun, hardware.gpus, host=hardware.host)
    first = start_settings(config, start.settings, cuda=hardware.cuda)
    supervised = {"start": fit_supervised(first, config, hardware, run / "start")}
    for name, one in arms.supervised.items():
        rl = runs[RL].config if RL in runs else config
        later = sft_settings(rl.resolved(hardware.cuda), one.settings)
        folder = run / f"{name}-{arguments.seed}"
        supervised[name] = fit_supervised(later, config, hardware, folder)
    return ArmsPlan(runs, supervised)


def _check(planned: ArmsPlan) -> None:
    """Refuse what does not fit. Raises ConfigError with the problems of all arms."""
    problems = planned.problems()
    if problems:
        raise ConfigError("arms", problems)
    for said in planned.notes():
        Console().line(f"note: {said}")


def _served(config: TrainConfig, hardware: Hardware) -> TrainConfig:
    """Return the config with every setting filled in, those of servers on GPUs as chosen."""
    if not hardware.cuda or config.cluster is not None:
        return config.resolved(hardware.cuda)
    made = choose(shape_of(config), config, hardware.gpus, host=hardware.host, advise=False)
    return made.config.resolved(cuda=True)


def _ask_sets(checkpoint: Path, sets: Sets, how: Mapping[str, Any], path: Path) -> None:
    """Ask a policy the further held-out sets, once."""
    if sets and not (path.exists() and read_result(path).complete):
        evaluate(str(checkpoint), sets, output=path, pbar=False, **how)


def _compared(folders: Sequence[tuple[str, Path]], sets: Sets) -> RunComparison:
    """Compare the arms at equal FLOPs, on the held-out tasks and on the further sets."""
    found = compare_runs(
        [folder for _, folder in folders], by="flops", arms=[name for name, _ in folders]
    )
    if not sets:
        return found
    files: dict[str, list[Path]] = {}
    for name, folder in folders:
        files.setdefault(name, []).append(folder / "sets.json")
    start = folders[0][1].parent / "start" / "sets.json"
    table = [["arm", *heads(RL, "the arm", found.confidence), "verdict"]]
    for name, each in {"start": [start], **files}.items():
        if name != RL:
            for one in compare_seeds(files[RL], each, confidence=found.confidence):
                verdict = ""
                if one.difference is not None and name != "start":
                    if len(each) > 1:
                        verdict = one.difference.verdict(found.confidence)
                    else:
                        verdict = "one seed"
                table.append([name, *one.row(), verdict])
    return dataclasses.replace(found, sets=table)


def _costs(plan: Plan, arms: Arms, seeds: int) -> str:
    """Describe the cost of all arms, from the plan of RL; SFT takes as many FLOPs."""
    each = plan.flops
    flops = plan.iterations * (each.sampling + each.training + each.prepass)
    share = flops / each.training if each.training else 0.0  # of an iteration's training
    tokens = share * plan.work.row_tokens
    seconds = share * plan.seconds.phases["train"].seconds
    sft = f"SFT, of each seed, takes the {si_spaced(flops)}FLOP that RL takes"
    if tokens:
        sft += f": steps over about {si_spaced(tokens)}tokens, {duration(seconds)}"
    lines = [sft]
    search = 0.0
    if arms.rates:
        search = len(arms.rates) * seconds
        rates = ", ".join(f"{rate:g}" for rate in arms.rates)
        lines.append(
            f"before it, held-out loss chooses its learning rate among {rates}, once: "
            f"{si_spaced(len(arms.rates) * flops)}FLOP, {duration(search)} (--sft lr=… skips it)"
        )
    one_seed = plan.seconds.run + len(arms.supervised) * seconds
    for count in dict.fromkeys((seeds, _SEEDS)):
        whole = duration(search + count * one_seed)
        lines.append(f"{counted(count, 'seed')} (--seeds {count}): about {whole} in all")
    if len(arms.runs) > 1:
        others = ", ".join(name for name in arms.runs if name != RL)
        lines.append(f"not in these sums: {others}, with settings of their own")
    return "\n".join(lines)

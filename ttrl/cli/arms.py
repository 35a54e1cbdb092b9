"""Compare arms from one checkpoint at equal FLOPs: reinforcement learning, further supervised
training, and other named arms.

    RUN/start/          supervised training until good enough held-out answers; all arms start here
    RUN/RL-0/           a run, for each seed
    RUN/SFT-0/          supervised training, on as many FLOPs as RL-0 took
    RUN/NAME-0/         a further arm: the run with other settings
    RUN/compare.html    the report (`ttrl.report.compared_runs`), written again after each seed

Each is a run folder, so the same call continues after an interruption. An iteration of a
supervised run is a piece of it, with the held-out tasks at its end. The pieces of SFT end at the
FLOPs of its steps, B·3f each (B: tokens of a step, f: FLOPs of a token's forward pass), nearest to
RL's spending after some of its iterations, on reading prompts, writing answers, passes before its
updates, and forward and backward passes: N = ΣF / (B·3f) steps in all, within half a step.

Supervised training takes over the run's dtype and GPUs (`ttrl.plans.supervised`). Settings and
memory of all arms are checked before the first one starts.
"""

import argparse
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ttrl.cli.recipe_script import run_recipe
from ttrl.cli.settings import with_settings
from ttrl.configs.base import Settings
from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, UserError
from ttrl.evaluation.comparison import compare_seeds
from ttrl.evaluation.eval_results import read_result
from ttrl.evaluation.evaluate import EvalConfig, checked_sets, evaluate
from ttrl.facts import MetricsRow, RolloutStats, TrainFacts, TrainFigures, ValidateFacts, number
from ttrl.launch.tune import SFT_RECIPE, tune
from ttrl.loop.checks import checked
from ttrl.loop.start import train
from ttrl.plans.open_choices import choose
from ttrl.plans.open_settings import as_begun
from ttrl.plans.supervised import (
    ArmsPlan,
    Hardware,
    fit_supervised,
    setting_problems,
    sft_settings,
    shape_of,
    start_settings,
)
from ttrl.report.compared_runs import RunComparison, compare_runs, spent
from ttrl.run_folder.folder import IterationFolder, RunFolder
from ttrl.run_folder.metrics import metrics_row
from ttrl.run_folder.reader import held_out_text, read_mapping, read_run
from ttrl.system.console import Console, clock
from ttrl.system.files import append_jsonl, read_jsonl, read_object, write_jsonl
from ttrl.system.processes import reap_leftovers
from ttrl.tasks.task import Task
from ttrl.text import counted, percent, present, si_spaced

RL = "RL"
SFT = "SFT"

Sets = str | Mapping[str, Sequence[Task]]
"""Held-out sets as `evaluate` takes them: families as text, or tasks by name."""


@dataclass(frozen=True)
class Supervised:
    """Describe supervised training."""

    examples: Sequence[Mapping[str, Any]]
    """{"messages": …}, with the answers."""
    settings: Mapping[str, Any]
    """Of SFTConfig: learning rate, conversations in a step, …"""
    marks: Sequence[int] = ()
    """Of the start: step counts for asking the held-out tasks; the last one ends it."""
    metric: str = "exact"
    stop_at: float | None = None
    """Of the start: a metric value for an earlier end, such as a share of 0.95 of answers in the
    requested format (metric "format").
    """


@dataclass(frozen=True)
class HeldOut:
    """Hold the tasks for each policy, and further settings of `evaluate`."""

    tasks: Sequence[Task]
    metric: str
    how: Mapping[str, Any]


def arm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_arms`."""
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of seeds, counted from --seed (default: 5)"
    )
    parser.add_argument(
        "--points",
        type=int,
        default=2,
        help="number of SFT checkpoints to evaluate on the held-out tasks (default: 2)",
    )
    families = 'held-out sets for the end, as in `ttrl eval --tasks` ("": none)'
    parser.add_argument("--sets", metavar="LIST", help=families)
    parser.add_argument(
        "--sets-n", type=int, metavar="N", help="at most N tasks of each set (default: all)"
    )
    further = "add an arm: RL with other settings; may be repeated"
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
    named = {RL: config}
    for name, *changes in arguments.arm:
        if (
            name in (RL, SFT, "start")
            or name in named
            or not name.replace("-", "").replace("_", "").isalnum()
        ):
            raise UserError(
                f"--arm {name}: choose another name, of letters, digits and dashes; {RL} and {SFT} "
                "are taken"
            )
        named[name], found = with_settings(config, changes)
        problems += [f"--arm {name}: {problem}" for problem in found if problem not in problems]
    if arguments.seeds < 1 or arguments.points < 1 or arguments.overfit is not None:
        raise UserError(
            "--seeds and --points must be at least 1, and --overfit leaves no held-out tasks to "
            "compare arms on"
        )
    config = dataclasses.replace(config, run=str(Path(arguments.run, f"{RL}-{arguments.seed}")))
    problems += setting_problems("start", start_settings(config, start.settings, cuda=False))
    problems += setting_problems(SFT, sft_settings(config, sft.settings))
    checked(config, tasks, held_out, model=False, problems=problems)
    if arguments.check:
        said = run_recipe(arguments, config, tasks, held_out, "")
        if arguments.plan is None or arguments.plan.json:
            return said
        return f"{said}\n\nThis is the arm {RL}; with --probe, ttrl plans the others, too."
    planned = _planned(arguments, named, start, sft)
    if arguments.plan:
        said = run_recipe(arguments, config, tasks, held_out, "")
        return f"{said}{_sft_plan(Path(config.run))}\n\n{planned}"
    _check(planned)
    sets = sets if arguments.sets is None else arguments.sets
    if sets:
        checked_sets(EvalConfig(model=config.model, tasks=sets, n=arguments.sets_n, pbar=False))
    with Console().interruptible(f"the same command continues {arguments.run}"):
        return _run_arms(arguments, named, tasks, held_out, start, sft, sets)


def _run_arms(
    arguments: argparse.Namespace,
    named: Mapping[str, TrainConfig],
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    start: Supervised,
    sft: Supervised,
    sets: Sets,
) -> str:
    run = Path(arguments.run)
    config = named[RL]
    hardware = Hardware.of(config)
    how = _how(_served(config, hardware))
    asked = HeldOut(held_out, config.validation_metric, how)
    of_start = dataclasses.replace(asked, metric=start.metric)
    model = _start(run / "start", config, start, of_start, hardware)
    sampled = {"n": arguments.sets_n, "max_tokens": config.max_tokens}
    served = ("dtype", "max_model_len", "server_args", "chat_template")
    sampled |= {name: how[name] for name in served}
    _ask_sets(model, sets, sampled, run / "start" / "sets.json")
    write_jsonl(run / "examples.jsonl", [dict(one) for one in sft.examples])
    folders: list[tuple[str, Path]] = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for name, settings in named.items():
            folder = run / f"{name}-{seed}"
            own = dataclasses.replace(settings, run=str(folder), seed=seed, model=str(model))
            result = train(own, tasks=tasks, validation_tasks=held_out)
            _ask_sets(result.checkpoint, sets, sampled, folder / "sets.json")
            folders.append((name, folder))
            if name == RL:
                folders.append((SFT, run / f"{SFT}-{seed}"))
                given = (sft, asked, arguments.points, settings, hardware)
                checkpoint = _same_flops(folder, folders[-1][1], *given)
                _ask_sets(checkpoint, sets, sampled, folders[-1][1] / "sets.json")
        compared = _compared(folders, sets)
        page = compared.write_html(run / "compare.html")
    return f"{compared.table()}\n{page}"


def _how(config: TrainConfig) -> Settings:
    """Return a run's settings for its held-out tasks, as settings of `evaluate`."""
    return {
        "samples_per_task": config.validation_samples,
        "temperature": config.resolved_validation_temperature,
        "max_tokens": config.max_tokens,
        "params": config.sampling,
        "dtype": None if config.dtype == "auto" else config.dtype,
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
    includes this training. Raises the errors of `run_recipe` and `supervised_run`.
    """
    if arguments.tiny:
        return config
    own, problems = with_settings(config, arguments.set)
    wrong = setting_problems("start", start_settings(own, start.settings, cuda=False))
    if wrong or not (arguments.check or arguments.plan):
        checked(own, tasks, held_out, model=not arguments.check, problems=problems + wrong)
    if arguments.check or problems:
        return config
    planned = _planned(arguments, {RL: own}, start, None)
    if arguments.plan:
        print(f"{planned}\n")
        return config
    _check(planned)
    hardware = Hardware.of(own)
    asked = HeldOut(held_out, start.metric, _how(_served(own, hardware)))
    run = Path(arguments.run)
    with Console().interruptible(f"the same command continues {run}"):
        model = _start(run / "start", own, start, asked, hardware)
    return dataclasses.replace(config, model=str(model))


def _planned(
    arguments: argparse.Namespace,
    named: Mapping[str, TrainConfig],
    start: Supervised,
    sft: Supervised | None,
) -> ArmsPlan:
    """Plan the arms of the first seed; arms already begun keep their settings."""
    run = Path(arguments.run)
    config = named[RL]
    hardware = Hardware.of(config)
    model = shape_of(config)
    runs = {}
    for name, settings in named.items():
        if settings.cluster is None:  # otherwise its machines decide, once the run is there
            if sft is None:
                folder = run
            else:
                folder = run / f"{name}-{arguments.seed}"
            begun = as_begun(settings, RunFolder(folder).config())
            runs[name] = choose(model, begun, hardware.gpus, host=hardware.host)
    first = start_settings(config, start.settings, cuda=hardware.cuda)
    supervised = {"start": fit_supervised(first, config, hardware, run / "start")}
    if sft is not None:
        rl = runs[RL].config if RL in runs else config
        later = sft_settings(rl.resolved(hardware.cuda), sft.settings)
        folder = run / f"{SFT}-{arguments.seed}"
        supervised[SFT] = fit_supervised(later, config, hardware, folder)
    return ArmsPlan(runs, supervised)


def _check(planned: ArmsPlan) -> None:
    """Refuse what does not fit. Raises ConfigError with the problems of all arms."""
    problems = planned.problems()
    if problems:
        raise ConfigError("arms", problems)
    for note in planned.notes():
        Console().line(f"note: {note}")


def _served(config: TrainConfig, hardware: Hardware) -> TrainConfig:
    """Return the config with the settings chosen for its servers on GPUs."""
    if not hardware.cuda or config.cluster is not None:
        return config
    made = choose(shape_of(config), config, hardware.gpus, host=hardware.host, advise=False)
    return made.config.resolved(cuda=True)


def _start(
    run: Path,
    config: TrainConfig,
    start: Supervised,
    asked: HeldOut,
    hardware: Hardware,
) -> Path:
    """Train the model for a run's start, unless it is good enough as it is; return its folder."""
    from ttrl.loop.train import local_model  # loads PyTorch
    from ttrl.server.chat_template import with_chat_template

    write_jsonl(run / "examples.jsonl", [dict(one) for one in start.examples])
    model = local_model(config.model, chat_template=config.chat_template is None)
    settings = {
        **start_settings(config, start.settings, cuda=hardware.cuda),
        "model": str(with_chat_template(model, config.chat_template, run.absolute() / "model")),
        "data": str(run / "examples.jsonl"),
    }
    fitted = fit_supervised(settings, config, hardware, run)
    return supervised_run(
        run,
        fitted.settings,
        asked,
        by="steps",
        marks=start.marks,
        stop_at=start.stop_at,
        processes=fitted.processes,
    )


def _same_flops(
    rl: Path,
    run: Path,
    sft: Supervised,
    asked: HeldOut,
    points: int,
    config: TrainConfig,
    hardware: Hardware,
) -> Path:
    """Train on as many FLOPs as the run `rl` took, from the same starting model; return the
    checkpoint. config: the run's as it was given.
    """
    made, _ = TrainConfig.examine(read_mapping(rl / "config.yaml"))
    settings = {**sft_settings(made, sft.settings), "data": str(run.parent / "examples.jsonl")}
    fitted = fit_supervised(settings, config, hardware, run)
    flops = spent(read_run(rl))["flops"]
    chosen = sorted(
        {round((len(flops) - 1) * point / points) for point in range(1, points + 1)} - {0}
    )
    return supervised_run(
        run,
        fitted.settings,
        dataclasses.replace(asked, how={**asked.how, "dtype": made.dtype}),
        by="flops",
        marks=present(flops[place] for place in chosen),
        before=RunFolder(rl).iteration(0),
        processes=fitted.processes,
    )


def supervised_run(
    run: Path,
    settings: Mapping[str, Any],
    asked: HeldOut,
    *,
    by: Literal["steps", "flops"],
    marks: Sequence[float],
    stop_at: float | None = None,
    before: IterationFolder | None = None,
    processes: int = 1,
) -> Path:
    """Train up to each mark, counted from the start, and ask the held-out tasks there and before
    the start; end once their metric reaches `stop_at`. The same call continues after an
    interruption. Returns the folder of the last model.

    settings: of SFTConfig. before: another run's iteration; its answers by the starting model are
    taken over. processes: on this machine, one for each GPU.
    """
    folder = RunFolder(run)
    with folder.locked():
        reap_leftovers(folder.path)
        folder.clean()
        own = {
            "run": str(run),
            "seed": settings["seed"],
            "model": settings["model"],
            "validation_metric": asked.metric,
        }
        training = {name: value for name, value in settings.items() if name not in own}
        remembered = own | {"by": by, "marks": list(marks), "training": training}
        if processes > 1:
            remembered["nproc_per_node"] = processes
        folder.remember_config(remembered)
        rows = {row.iteration: row for row in folder.metrics()}
        checkpoint = Path(settings["model"])
        for place, mark in enumerate([0, *marks]):
            if place not in rows:
                if place:
                    left = mark - sum(_spent(row.train, by) for row in rows.values())
                    piece = {**settings, by: round(left) if by == "steps" else left}
                    _train_on(folder, place, piece, processes)
                rows[place] = _finish(folder, place, checkpoint, asked, before, rows.get(place - 1))
            if place:
                checkpoint = folder.checkpoint(place)
            row = rows[place]
            value = number(row.held_out(asked.metric))
            if value is None:
                known = ", ".join(["reward", *(row.validation or {})])
                raise UserError(
                    f"{run}: the held-out tasks have no metric {asked.metric!r}; choose one of "
                    f"{known}"
                )
            steps = counted(row.train.global_step or 0, "supervised step")
            Console().line(
                f"{folder.path.name}: after {steps}, held-out {asked.metric} "
                f"{held_out_text(row, asked.metric)}"
            )
            if stop_at is not None and value >= stop_at:
                break
    return checkpoint


def _spent(train: TrainFigures, by: Literal["steps", "flops"]) -> float:
    if by == "steps":
        return train.steps or 0
    return train.flops or 0.0


def _train_on(
    folder: RunFolder,
    place: int,
    settings: Mapping[str, Any],
    processes: int,
) -> None:
    """Train the next piece, from model and state of the one before."""
    iteration = folder.iteration(place)
    state = folder.state(place - 1)
    if iteration.is_done("train"):
        return
    config = {**settings, "output_dir": str(iteration.path), "save_state": True}
    if state is not None:
        config |= {"model": str(folder.checkpoint(place - 1)), "state": str(state)}
    began = clock()
    tune(
        config,
        iteration.path / "sft.yaml",
        recipe=SFT_RECIPE,
        nproc_per_node=processes,
        pbar_desc=f"{folder.path.name}: supervised training, {place}",
    )
    facts = TrainFacts(
        seconds=clock() - began,
        trained=True,
        steps=read_jsonl(iteration.path / "train.jsonl"),
    )
    iteration.mark(facts, ["train.jsonl", "checkpoint", "state"])


def _finish(
    folder: RunFolder,
    place: int,
    checkpoint: Path,
    asked: HeldOut,
    before: IterationFolder | None,
    row_before: MetricsRow | None,
) -> MetricsRow:
    """Ask the held-out tasks; write and return the line of metrics.jsonl."""
    iteration = folder.iteration(place)
    path = iteration.path / "validation.jsonl"
    if not iteration.is_done("validate"):
        if place or before is None:
            known = None
        else:
            known = before.marker(ValidateFacts)
        if known is not None and before is not None:
            iteration.path.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(before.path / path.name, path)
            facts = ValidateFacts(
                seconds=known.seconds,
                stats=known.stats,
                sampling=known.sampling,
                intervals=known.intervals,
            )
        else:
            facts = _ask(folder.checkpoint(place) if place else checkpoint, asked, path)
        iteration.mark(facts, [path.name])
    row = metrics_row(iteration)
    total = row.flops.total or 0.0
    earlier = 0.0 if row_before is None else row_before.flops.cumulated or 0.0
    trained = iteration.marker(TrainFacts) or TrainFacts()
    row = row.replace(
        flops=row.flops.replace(total=total, cumulated=total + earlier),
        completion_tokens=sum(step.trained_tokens or 0 for step in trained.taken()),
    )
    append_jsonl(folder.path / "metrics.jsonl", row.to_json())
    folder.prune(place, keep=1, best=None)
    return row


def _ask(checkpoint: Path, asked: HeldOut, path: Path) -> ValidateFacts:
    """Ask a policy the held-out tasks; return the facts for the marker, as a run does."""
    began = clock()
    found = evaluate(
        str(checkpoint), {"held-out": asked.tasks}, samples_file=path, pbar=False, **asked.how
    )["held-out"]
    stats = RolloutStats(
        num_tasks=found.num_tasks,
        num_samples=found.num_samples,
        num_graded=found.num_samples - found.num_failed,
        num_failed=found.num_failed,
        mean_reward=found.reward.mean,
        metrics={name: one.mean for name, one in found.metrics.items() if one.mean is not None},
    )
    spans = {
        name: (one.low, one.high)
        for name, one in {"reward": found.reward, **found.metrics}.items()
        if one.low is not None and one.high is not None
    }
    temperature = asked.how.get("temperature")
    how = (
        f"{'greedy' if not temperature else f'temperature {temperature:g}'}, {found.num_tasks} "
        "tasks"
    )
    return ValidateFacts(seconds=clock() - began, stats=stats, sampling=how, intervals=spans)


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
    heads = [
        "tasks",
        "n",
        "score",
        RL,
        "the arm",
        "difference",
        f"{percent(found.confidence)} interval",
        "p",
        "better/worse",
    ]
    table = [["arm", *heads, "verdict"]]
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


def _sft_plan(run: Path) -> str:
    """Describe RL's plan for SFT; it takes as many FLOPs."""
    plan = read_object(run / "plan.json")
    flops = plan["iterations"] * sum(
        plan["flops"][name] for name in ("sampling", "training", "prepass")
    )
    if plan["work"]["row_tokens"]:
        each = plan["flops"]["training"] / plan["work"]["row_tokens"]
    else:
        each = 0.0
    if each:
        tokens = f": steps over about {si_spaced(flops / each)}tokens"
    else:
        tokens = ""
    return f"\n\nSFT of each seed uses the {si_spaced(flops)}FLOP of RL{tokens}"

"""Compare ttrl with TRL's GRPOTrainer on this machine: the same task, model, prompts and settings.

    python tools/compare_trl.py [--folder runs/compare_trl] [--seeds 2] [--steps 5]
    python tools/compare_trl.py --settings    # the settings of both, side by side

SmolLM2-135M-Instruct learns to write facts as JSON, as in recipes/structured_output.py. The two
train in turn, and each goes first with every other seed. Both get the same prompts in the same
order, the same grader, and as many threads as the machine has cores. Held-out sentences are asked
afterwards, the same for all models, by `ttrl.evaluate`.

TRL has an environment of its own, .venv/trl, made at the first call with the versions of torch and
transformers that ttrl uses. pip takes torch as its index offers it; a build for CUDA computes on
the CPU here, too. The same command continues an interrupted comparison. It writes comparison.md
and the curves, comparison.svg, into the folder.

Some things cannot be made equal; UNEQUAL lists them, and the report repeats them.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ttrl import TrainConfig, evaluate, train
from ttrl.evaluation.comparison import compare_seeds
from ttrl.evaluation.eval_results import read_result
from ttrl.facts import number
from ttrl.intervals import estimate_mean
from ttrl.loop.task_stream import TaskStream
from ttrl.ready_models import ready_model
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_run
from ttrl.system.files import read_jsonl, write_text
from ttrl.tasks.structured_output import get_structured_output_tasks
from ttrl.tasks.task import Task

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv" / "trl"
ARM = ROOT / "tools" / "trl_arm.py"
TRL = "trl==1.16.0"
SAME_VERSIONS = ("torch", "transformers", "accelerate", "datasets", "msgspec")
"""Packages of TRL's environment in the versions of ttrl's."""
ARMS = ("ttrl", "TRL")
MODEL = "smollm2-135m"
SET = "json"
POLL = 2.0  # seconds between two looks at a process: each takes CPU time from it
UNEQUAL = (
    "ttrl samples with vLLM; TRL samples with transformers, because its vLLM modes need CUDA.",
    "ttrl stores a prompt once for its samples; TRL pads each sample.",
    "ttrl trains in one process with all threads; TRL in two with half of them each, its faster "
    "way here.",
    "Samples differ even with one seed, because the samplers draw random numbers in other ways.",
    "TRL divides advantages by the standard deviation with n - 1 and adds 1e-4; ttrl by the one "
    "with n. With 8 samples, TRL's are 6.5% smaller, before gradients are clipped.",
    "TRL counts tokens of groups without a signal in the mean of the loss; ttrl leaves them out.",
    "ttrl also compares each weight and each token's log-probability with the server, measures "
    "gradient noise, and writes checkpoint and optimizer state of every step; TRL writes its model "
    "at the end.",
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of a comparison."""

    steps: int = 5
    tasks: int = 8
    """Prompts of a step."""
    samples: int = 8
    """Of each prompt."""
    max_tokens: int = 48
    lr: float = 2e-5
    processes: int = 2
    """Of TRL."""
    microbatch: int = 4
    """Samples in one pass of a process of TRL."""

    @property
    def accumulation(self) -> int:
        """Return the passes of each process of TRL in a step."""
        return self.tasks * self.samples // (self.processes * self.microbatch)


def ttrl_settings(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Return settings of TrainConfig."""
    return {
        "iterations": sizes.steps,
        "tasks_per_iteration": sizes.tasks,
        "samples_per_task": sizes.samples,
        "max_tokens": sizes.max_tokens,
        "temperature": 1.0,
        "seq_len": 1024,
        "dtype": "fp32",
        "advantages": "std",
        "aggregation": "token",
        "seed": seed,
        "training": {
            "objective": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "updates_per_iteration": 1,
            "kl_coefficient": 0.0,
            "optimizer": "adamw",
            "lr": sizes.lr,
            "lr_schedule": "constant",
            "warmup_steps": 0,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
    }


def trl_settings(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Return settings of TRL's GRPOConfig."""
    return {
        "max_steps": sizes.steps,
        "per_device_train_batch_size": sizes.microbatch,
        "gradient_accumulation_steps": sizes.accumulation,
        "num_generations": sizes.samples,
        "max_completion_length": sizes.max_tokens,
        "temperature": 1.0,
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "optim": "adamw_torch",
        "learning_rate": sizes.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": seed,
        "shuffle_dataset": False,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        # On by default, and slower: memory suffices.
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


class Shared(NamedTuple):
    """A setting of both."""

    meaning: str
    ttrl: Any
    trl: Any


def shared_settings(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], sizes: Sizes
) -> list[Shared]:
    """Return each setting as either of them has it."""
    training = ours["training"]
    passes = theirs["gradient_accumulation_steps"] * sizes.processes
    prompts = theirs["per_device_train_batch_size"] * passes // theirs["num_generations"]
    losses = {"dapo": "token"}
    deviations = {"group": "std"}
    dtypes = {"float32": "fp32"}
    optimizers = {"adamw_torch": "adamw"}
    return [
        Shared("steps", ours["iterations"], theirs["max_steps"]),
        Shared("prompts of a step", ours["tasks_per_iteration"], prompts),
        Shared("samples of a prompt", ours["samples_per_task"], theirs["num_generations"]),
        Shared("updates of a step", training["updates_per_iteration"], theirs["num_iterations"]),
        Shared("longest reply, tokens", ours["max_tokens"], theirs["max_completion_length"]),
        Shared("temperature", ours["temperature"], theirs["temperature"]),
        Shared("dtype", ours["dtype"], dtypes[theirs["model_init_kwargs"]["dtype"]]),
        Shared("advantages / deviation", ours["advantages"], deviations[theirs["scale_rewards"]]),
        Shared("mean of the loss over", ours["aggregation"], losses[theirs["loss_type"]]),
        Shared("ratio clipped below 1 -", training["clip_low"], theirs["epsilon"]),
        Shared("ratio clipped above 1 +", training["clip_high"], theirs["epsilon_high"]),
        Shared("KL coefficient", training["kl_coefficient"], theirs["beta"]),
        Shared("optimizer", training["optimizer"], optimizers[theirs["optim"]]),
        Shared("learning rate", training["lr"], theirs["learning_rate"]),
        Shared("its schedule", training["lr_schedule"], theirs["lr_scheduler_type"]),
        Shared("its warm-up, steps", training["warmup_steps"], theirs["warmup_steps"]),
        Shared("beta 1", training["beta1"], theirs["adam_beta1"]),
        Shared("beta 2", training["beta2"], theirs["adam_beta2"]),
        Shared("epsilon", training["eps"], theirs["adam_epsilon"]),
        Shared("weight decay", training["weight_decay"], theirs["weight_decay"]),
        Shared("largest gradient norm", training["max_grad_norm"], theirs["max_grad_norm"]),
        Shared("seed", ours["seed"], theirs["seed"]),
    ]


def check_equal(sizes: Sizes, seed: int) -> None:
    """Raise SystemExit if the two have a different setting."""
    found = shared_settings(ttrl_settings(sizes, seed), trl_settings(sizes, seed), sizes)
    different = [f"{one.meaning}: {one.ttrl} and {one.trl}" for one in found if one.ttrl != one.trl]
    if different:
        sys.exit(f"compare_trl: ttrl and TRL would differ in {'; '.join(different)}")


def pinned(name: str) -> str:
    """Return a package with the version in ttrl/tested_versions.txt."""
    text = (ROOT / "ttrl" / "tested_versions.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(name)}==([\w.+]+)", text, re.MULTILINE)
    assert found, f"{name} has no version in ttrl/tested_versions.txt"
    return f"{name}=={found[1].partition('+')[0]}"


def make_environment(folder: Path = ENVIRONMENT) -> Path:
    """Return the Python of TRL's environment; install it at the first call, or after a change."""
    python = folder / "bin" / "python"
    packages = [TRL, *map(pinned, SAME_VERSIONS)]
    stamp = folder / "packages.txt"
    wanted = "\n".join(packages)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {TRL} into {folder}: a few minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *packages], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python


class Usage(NamedTuple):
    """The cost of an arm, its start included."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Of all its processes together; a page of several counts once."""


class Watch(threading.Thread):
    """Looks at a process and its descendants until `stop`."""

    def __init__(self, pid: int, every: float) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._every = every
        self._done = threading.Event()
        self._cpu: dict[tuple[int, float], float] = {}
        self.peak = 0

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU time of every process seen so far."""
        return sum(self._cpu.values())

    def run(self) -> None:
        """Look, again and again."""
        while not self._done.wait(self._every):
            self.look()

    def look(self) -> None:
        """Look once."""
        total = 0
        try:
            first = psutil.Process(self._pid)
            found = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in found:
            try:
                times = process.cpu_times()
                total += process.memory_full_info().pss
                self._cpu[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue
        self.peak = max(self.peak, total)

    def stop(self) -> None:
        """End it."""
        self._done.set()
        self.join()


def watched(
    command: Sequence[str], log: Path, variables: Mapping[str, str], every: float = POLL
) -> Usage:
    """Run a command to its end, and measure it, with a look `every` so many seconds. Raises
    SystemExit if it fails.
    """
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **variables}
        )
        watch = Watch(process.pid, every)
        watch.start()
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            watch.stop()
    if status:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
        sys.exit(f"compare_trl: exit status {status}; {log} ends with:\n{tail}")
    return Usage(time.perf_counter() - started, watch.cpu_seconds, watch.peak)


class Step(NamedTuple):
    """The figures of a step."""

    reward: float
    exact: float
    generate: float
    """Seconds, as the next two."""
    train: float
    total: float
    tokens: float
    """Of the completions."""


def ttrl_steps(run: Path) -> list[Step]:
    """Return the steps of a run of ttrl."""
    steps = []
    for row in read_run(run).trained:
        seconds = row.seconds
        figures = (row.reward, row.metric("exact"), seconds.sample, seconds.train, seconds.total)
        steps.append(Step(*(number(one) or 0.0 for one in (*figures, row.completion_tokens))))
    return steps


def trl_steps(found: Mapping[str, Any], samples: int) -> list[Step]:
    """Return the steps in the steps.json of TRL's arm. samples: of all prompts of a step."""
    return [
        Step(
            logged["reward"],
            logged["exact"],
            seconds["generate"],
            seconds["total"] - seconds["generate and grade"],
            seconds["total"],
            logged["completions/mean_length"] * samples,
        )
        for logged, seconds in zip(found["logged"], found["seconds"], strict=True)
    ]


def train_tasks(sizes: Sizes, seed: int, run: Path) -> list[Task]:
    """Return the tasks that a run of ttrl samples, in its order."""
    tasks = get_structured_output_tasks("train", n=1024, seed=seed)
    config = TrainConfig(run=str(run), model=MODEL, **ttrl_settings(sizes, seed))
    return TaskStream(config, RunFolder(run), tasks).tasks_from(0, sizes.steps * sizes.tasks)


def run_ttrl(folder: Path, sizes: Sizes, seed: int) -> None:
    """Train with ttrl; called in a process of its own."""
    config = TrainConfig(run=str(folder / "run"), model=MODEL, **ttrl_settings(sizes, seed))
    train(config, get_structured_output_tasks("train", n=1024, seed=seed))


def trl_order(folder: Path, sizes: Sizes, seed: int, model: str) -> dict[str, Any]:
    """Return the order for TRL's arm."""
    rows = [
        {"prompt": [*task.messages], "expected": task.grader.reference()}
        for task in train_tasks(sizes, seed, folder / "run")
    ]
    return {
        "model": model,
        "output": str(folder),
        "settings": trl_settings(sizes, seed),
        "rows": rows,
    }


def run_arm(name: str, folder: Path, sizes: Sizes, seed: int) -> None:
    """Train one arm, unless its folder has its usage."""
    done = folder / "usage.json"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M')} {name}, seed {seed}", file=sys.stderr)
    if name == "ttrl":
        numbers = json.dumps(dataclasses.asdict(sizes))
        command = [sys.executable, __file__, "--ttrl-arm", str(folder), numbers, str(seed)]
        variables = {}
    else:
        order = folder / "order.json"
        model = str(ready_model(MODEL))
        write_text(order, json.dumps(trl_order(folder, sizes, seed, model), indent=1))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        command = [str(make_environment()), *launch, str(sizes.processes), str(ARM), str(order)]
        threads = max(1, (os.cpu_count() or 1) // sizes.processes)
        variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    usage = watched(command, folder / "log.txt", variables)
    write_text(done, json.dumps(usage._asdict()))


@dataclass(frozen=True)
class Arm:
    """A trained arm, with one seed."""

    name: str
    seed: int
    steps: list[Step]
    usage: Usage
    model: Path
    prompt: list[int]
    """Token ids of the first prompt."""

    def median(self, part: str) -> float:
        """Return the median over the steps after the first, which also warms up."""
        values = [getattr(step, part) for step in self.steps[1:] or self.steps]
        return statistics.median(values)

    @property
    def speed(self) -> float:
        """Return the completion tokens per second of generation."""
        later = self.steps[1:] or self.steps
        return sum(one.tokens for one in later) / sum(one.generate for one in later)


def read_arm(name: str, folder: Path, sizes: Sizes, seed: int) -> Arm:
    """Read an arm's folder."""
    usage = Usage(**json.loads((folder / "usage.json").read_text(encoding="utf-8")))
    if name == "ttrl":
        run = folder / "run"
        model = run / "iterations" / f"{sizes.steps:04d}" / "checkpoint"
        samples = read_jsonl(run / "iterations" / "0001" / "rollouts.jsonl")
        prompt = list(samples[0]["prompt_token_ids"])
        return Arm(name, seed, ttrl_steps(run), usage, model, prompt)
    found = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    steps = trl_steps(found, sizes.tasks * sizes.samples)
    return Arm(name, seed, steps, usage, folder / "model", found["first_prompt"])


def ask(model: str, output: Path, held_out: Sequence[Task], max_tokens: int) -> Path:
    """Ask a model the held-out tasks, greedily, unless that was done; return the file."""
    if not output.exists():
        evaluate(model, {SET: held_out}, max_tokens=max_tokens, max_model_len=1024, output=output)
    return output


def accuracy(path: Path) -> str:
    """Return the share of exact answers in an evaluation, with its interval."""
    found = estimate_mean([one.known for one in read_result(path).sets[SET].tasks])
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def table(ours: Sequence[Arm], theirs: Sequence[Arm]) -> list[str]:
    """Return the costs of both as lines of a table: means over seeds, and TRL's over ttrl's."""
    rows = {
        "seconds of a step": lambda arm: arm.median("total"),
        "seconds to generate": lambda arm: arm.median("generate"),
        "seconds to train": lambda arm: arm.median("train"),
        "generated tokens per second": lambda arm: arm.speed,
        "CPU seconds of all steps and the start": lambda arm: arm.usage.cpu_seconds,
        "seconds of all steps and the start": lambda arm: arm.usage.seconds,
        "peak memory, GB": lambda arm: arm.usage.peak_bytes / 1e9,
    }
    lines = ["| | ttrl | TRL | TRL / ttrl |", "|---|---|---|---|"]
    for what, figure in rows.items():
        one = statistics.fmean(map(figure, ours))
        other = statistics.fmean(map(figure, theirs))
        lines.append(f"| {what} | {one:.3g} | {other:.3g} | {other / one:.2f} |")
    return lines


def rewards(arms: Sequence[Arm]) -> list[str]:
    """Return the mean reward of each step's samples as lines of a table."""
    count = len(arms[0].steps)
    lines = ["| step | " + " | ".join(f"{one.name}, seed {one.seed}" for one in arms) + " |"]
    lines.append("|---" * (len(arms) + 1) + "|")
    for place in range(count):
        values = " | ".join(f"{one.steps[place].reward:.2f}" for one in arms)
        lines.append(f"| {place + 1} | {values} |")
    return lines


def report(folder: Path, sizes: Sizes, seeds: Sequence[int], asked: int) -> str:
    """Ask the held-out tasks, and write the comparison; return its text."""
    from results import Curve, Point, picture

    held_out = get_structured_output_tasks("validation", n=asked)
    start = ask(MODEL, folder / "start.json", held_out, sizes.max_tokens)
    arms: dict[str, list[Arm]] = {name: [] for name in ARMS}
    files: dict[str, list[Path]] = {name: [] for name in ARMS}
    for seed in seeds:
        for name in ARMS:
            place = folder / f"{name}-{seed}"
            arms[name].append(read_arm(name, place, sizes, seed))
            model = str(arms[name][-1].model)
            files[name].append(ask(model, place / "held_out.json", held_out, sizes.max_tokens))
    same = "the same"
    if any(one.prompt != other.prompt for one, other in zip(*arms.values(), strict=True)):
        same = "DIFFERENT"
    lines = [f"# ttrl and {TRL.replace('==', ' ')}", ""]
    lines += [*table(arms["ttrl"], arms["TRL"]), ""]
    lines += ["Mean reward of a step's samples:", "", *rewards([*arms["ttrl"], *arms["TRL"]]), ""]
    lines += [f"Held out, greedy, {asked} sentences, share written exactly (95% interval):", ""]
    lines.append(f"- before: {accuracy(start)}")
    for name in ARMS:
        for seed, file in zip(seeds, files[name], strict=True):
            lines.append(f"- {name}, seed {seed}: {accuracy(file)}")
    [found] = compare_seeds(files["TRL"], files["ttrl"])
    if found.difference is not None:
        one = found.difference
        lines.append(
            f"- ttrl minus TRL: {one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f}; {one.method})"
        )
    lines += ["", f"Token ids of the first prompt: {same}. Not equal:", ""]
    lines += [f"- {one}" for one in UNEQUAL]
    text = "\n".join(lines) + "\n"
    write_text(folder / "comparison.md", text)
    curves = [
        Curve(one.name, [Point(n, s.reward) for n, s in enumerate(one.steps, 1)], color)
        for color, name in enumerate(ARMS, 1)
        for one in arms[name]
    ]
    write_text(folder / "comparison.svg", picture("reward of a step's samples", curves))
    return text


def side_by_side(sizes: Sizes) -> str:
    """Return the settings of both as lines."""
    found = shared_settings(ttrl_settings(sizes, 0), trl_settings(sizes, 0), sizes)
    width = max(len(one.meaning) for one in found)
    return "\n".join(f"{one.meaning:{width}}  {one.ttrl!s:>10}  {one.trl!s:>10}" for one in found)


def main() -> None:
    """Train both in turn, and print the comparison."""
    if sys.argv[1:2] == ["--ttrl-arm"]:
        folder, numbers, seed = sys.argv[2:]
        run_ttrl(Path(folder), Sizes(**json.loads(numbers)), int(seed))
        return
    usual = Sizes()
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--folder", type=Path, default=Path("runs/compare_trl"))
    parser.add_argument("--seeds", type=int, default=2, help="how many (2)")
    parser.add_argument("--steps", type=int, default=usual.steps, help=f"({usual.steps})")
    parser.add_argument("--held-out", type=int, default=128, help="held-out sentences (128)")
    shown = "print the settings of both, and train nothing"
    parser.add_argument("--settings", action="store_true", help=shown)
    arguments = parser.parse_args()
    sizes = Sizes(steps=arguments.steps)
    if arguments.settings:
        print(side_by_side(sizes))
        return
    folder = arguments.folder.absolute()
    make_environment()
    ready_model(MODEL)  # before the clock starts
    seeds = range(arguments.seeds)
    for seed in seeds:
        check_equal(sizes, seed)
        turn = ARMS if seed % 2 == 0 else ARMS[::-1]
        for name in turn:
            run_arm(name, folder / f"{name}-{seed}", sizes, seed)
    print(report(folder, sizes, seeds, arguments.held_out))


if __name__ == "__main__":
    main()

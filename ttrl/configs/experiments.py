"""List the numbered experiments of the report on RL with puzzles: recipes take them by
`--preset NUMBER`.

An entry says what was changed, why, and with which settings. `reported` holds the report's own
values, from the notebooks of its repository (github.com/bradhilton/rl-experiments). `ours` holds
values that it does not give. The rest comes from the recipe, and is ours, too. An entry may
continue another one, and then holds the differences.

The report's runs differ from these in five ways. Iterations shared half of their tasks with the
next ones. Steps took two rows on each GPU; here `updates_per_iteration` divides an iteration's
rows. Early stops ended held-out samples, too. Zebra-grid puzzles were those of ZebraLogicBench, and
here they are generated. Answers to Connections had to have the exact form in 010 to 018.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Setting: TypeAlias = bool | int | float | str | list[float] | dict[str, float] | None
Settings: TypeAlias = Mapping[str, Setting]

GPU_GB = 80
"""The memory of each GPU that an experiment is planned for."""
_DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Qwen"
_WHOLE: Settings = {"lora_rank": None, "advantages": "std", "seq_len": 16384}
_CLIPPED: Settings = {"objective": "ppo", "clip_low": 0.2, "clip_high": 0.2}
_SOFTLY: Settings = {"objective": "tanh", "clip_low": None, "clip_high": None}
_EARLY_STOP: Settings = {"early_stop": {"alpha": 0.992, "threshold": -3.0}}
_ADAMW: Settings = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
_LATER_ADAMW: Settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}


@dataclass(frozen=True)
class Experiment:
    """One experiment: its task, its model and hardware, and its settings."""

    number: str
    recipe: str
    """The recipe's name in recipes/, without .py."""
    changed: str
    """What is different from the experiment that it continues."""
    why: str
    """The question behind it, and the answer if the report gives one."""
    model: str = ""
    """A name on the hub; "" takes the one of `after`."""
    gpus: int = 0
    """The number of GPUs to plan for; 0 takes that of `after`. The report says it of the 70B."""
    after: str | None = None
    """The experiment that this one continues."""
    reported: Settings = field(default_factory=dict)
    ours: Settings = field(default_factory=dict)
    overfit: int | None = None
    """The number of tasks, if every iteration samples the same."""

    def line(self) -> list["Experiment"]:
        """Return this experiment and those that it continues, the newest first."""
        if self.after is None:
            return [self]
        return [self, *EXPERIMENTS[self.after].line()]

    @property
    def its_model(self) -> str:
        """Return the name of the model."""
        return next(one.model for one in self.line() if one.model)

    @property
    def its_gpus(self) -> int:
        """Return the number of GPUs."""
        return next(one.gpus for one in self.line() if one.gpus)

    @property
    def its_overfit(self) -> int | None:
        """Return the number of tasks, if every iteration samples the same."""
        return next((one.overfit for one in self.line() if one.overfit), None)

    def settings(self) -> dict[str, Setting]:
        """Return all settings, of a run and of the trainer, with model and tasks to overfit."""
        found: dict[str, Setting] = {"model": self.its_model}
        if self.its_overfit is not None:
            found["overfit"] = self.its_overfit
        for one in reversed(self.line()):
            found |= {**one.ours, **one.reported}
        return found


_IN_ORDER = (
    Experiment(
        "010",
        "nyt_connections",
        "REINFORCE on Connections: no clipping, no KL, no entropy bonus",
        "The plainest objective, as a baseline.",
        model=f"{_DISTILLED}-7B",
        gpus=4,
        reported={
            **_WHOLE,
            "objective": "reinforce",
            "lr": 1e-5,
            "tasks_per_iteration": 32,
            "samples_per_task": 16,
            "iterations": 100,
        },
        ours={"max_tokens": 8192, "updates_per_iteration": 4},
    ),
    Experiment(
        "012",
        "nyt_connections",
        "GRPO with a distilled 14B, KL and an entropy bonus",
        "Clipping, KL and entropy together keep the policy close and open.",
        model=f"{_DISTILLED}-14B",
        gpus=8,
        reported={
            **_WHOLE,
            **_CLIPPED,
            "lr": 1e-6,
            "kl_coefficient": 0.01,
            "entropy_coefficient": 0.05,
            "tasks_per_iteration": 8,
            "samples_per_task": 64,
            "iterations": 10,
        },
        ours={"max_tokens": 8192, "updates_per_iteration": 4},
    ),
    Experiment(
        "013",
        "nyt_connections",
        "a distilled 32B, and a learning rate of 5e-4",
        "How large may steps be? This is 500 times the rate of 012.",
        model=f"{_DISTILLED}-32B",
        after="012",
        reported={"lr": 5e-4},
    ),
    Experiment(
        "014",
        "nyt_connections",
        "rows of half the length",
        "Shorter rows hold fewer long samples, and twice as many fit into a microbatch.",
        after="013",
        reported={"seq_len": 8192},
        ours={"max_tokens": 6144, "rows_per_microbatch": 2},
    ),
    Experiment(
        "015",
        "nyt_connections",
        "the same 8 tasks in each iteration, and a learning rate of 5e-5",
        "Can it overfit eight puzzles? Else something is wrong.",
        after="013",
        reported={"lr": 5e-5},
        overfit=8,
    ),
    Experiment(
        "016",
        "nyt_connections",
        "the distilled 14B on the same 8 tasks",
        "The same question for the smaller model.",
        model=f"{_DISTILLED}-14B",
        after="015",
    ),
    Experiment(
        "018",
        "nyt_connections",
        "a 70B on eight GPUs",
        "Does it fit, and how long does an iteration take?",
        model="unsloth/Llama-3.3-70B-Instruct",
        after="012",
        reported={
            "lr": 5e-6,
            "kl_coefficient": 0.0,
            "entropy_coefficient": 0.0,
            "cpu_offload": True,
        },
    ),
    Experiment(
        "022",
        "temporal_clue",
        "temporal clue with an 8B and soft clipping",
        "Reproduces an earlier run: -tanh(log ratio)·A never cuts a gradient off.",
        model="NousResearch/Hermes-2-Theta-Llama-3-8B",
        gpus=4,
        reported={
            **_WHOLE,
            **_SOFTLY,
            **_ADAMW,
            "lr": 2e-6,
            "tasks_per_iteration": 64,
            "samples_per_task": 50,
            "iterations": 1000,
            "validation_samples": 2,
        },
        ours={"max_tokens": 4096, "updates_per_iteration": 4},
    ),
    Experiment(
        "023",
        "temporal_clue",
        "a distilled 7B, with fewer samples",
        "Reasoning models write ten times as much; fewer samples cost the same.",
        model=f"{_DISTILLED}-7B",
        after="022",
        reported={"tasks_per_iteration": 25, "samples_per_task": 20},
        ours={"max_tokens": 14336},
    ),
    Experiment(
        "024",
        "temporal_clue",
        "hard clipping, and a tenth of the learning rate",
        "Is the ratio's clipping of PPO better than tanh?",
        after="022",
        reported={**_CLIPPED, "lr": 2e-7},
    ),
    Experiment(
        "025",
        "temporal_clue",
        "a larger learning rate with hard clipping",
        "Clipping bounds a step, so it may be larger.",
        after="024",
        reported={"lr": 3e-6},
    ),
    Experiment(
        "026",
        "temporal_clue",
        "a learning rate by the number of rows, and an entropy bonus",
        "Few rows are noisy. The report divides 6e-5 by the steps of two rows, by 25 at least.",
        after="022",
        reported={"lr": 2.4e-6, "lr_rows": 2, "entropy_coefficient": 0.01},
        ours={"updates_per_iteration": 25},
    ),
    Experiment(
        "027",
        "temporal_clue",
        "an entropy bonus",
        "Does it keep answers diverse?",
        after="022",
        reported={"entropy_coefficient": 0.02},
    ),
    Experiment(
        "028",
        "zebra_grid",
        "zebra grids with the settings of 022",
        "Do the settings for temporal clue work for another puzzle?",
        after="022",
    ),
    Experiment(
        "029",
        "temporal_clue",
        "the distilled 7B with an entropy bonus, in small iterations",
        "Long answers, so few of them; 8 tasks with 16 samples.",
        after="023",
        reported={"entropy_coefficient": 0.02, "tasks_per_iteration": 8, "samples_per_task": 16},
    ),
    Experiment(
        "030",
        "temporal_clue",
        "a 14B",
        "A larger model of another family.",
        model="Qwen/Qwen2.5-14B-Instruct",
        gpus=8,
        after="027",
        reported={"tasks_per_iteration": 32, "max_tokens": 8192},
    ),
    Experiment(
        "031",
        "zebra_grid",
        "zebra grids with the 14B",
        "The same model on the other puzzle.",
        model="Qwen/Qwen2.5-14B-Instruct",
        gpus=8,
        after="028",
        reported={"tasks_per_iteration": 32, "samples_per_task": 32},
        ours={"max_tokens": 8192},
    ),
    Experiment(
        "034",
        "temporal_clue",
        "a surprise bonus of 0.1",
        "Unlikely right answers count for more, for diversity. Long nonsense hacked the grader.",
        after="022",
        reported={"surprise_bonus": 0.1, "surprise_until": "answer_end"},
    ),
    Experiment(
        "035",
        "temporal_clue",
        "the same again",
        "The report does not say.",
        after="034",
    ),
    Experiment(
        "036",
        "temporal_clue",
        "a surprise bonus of 0.3, with early stopping",
        "Nonsense ends when the mean log-probability falls below -3, and earns no bonus.",
        after="034",
        reported={"surprise_bonus": 0.3, **_EARLY_STOP},
    ),
    Experiment(
        "037",
        "temporal_clue",
        "a surprise bonus of 0.2, without early stopping",
        "A bonus between those of 035 and 036.",
        after="034",
        reported={"surprise_bonus": 0.2},
    ),
    Experiment(
        "038",
        "temporal_clue",
        "early stopping, compiled layers, AdamW with 0.99 and 0.1",
        "How fast can an iteration be?",
        after="022",
        reported={
            **_EARLY_STOP,
            **_LATER_ADAMW,
            "compile": True,
            "activation_checkpointing": True,
        },
        ours={"row_length_multiple": 2048},
    ),
    Experiment(
        "039",
        "temporal_clue",
        "the 14B with the settings of 038",
        "Among the best of the report.",
        model="Qwen/Qwen2.5-14B-Instruct",
        gpus=8,
        after="038",
        reported={"tasks_per_iteration": 32, "max_tokens": 8192},
    ),
    Experiment(
        "040",
        "temporal_clue",
        "a 32B",
        "Does size help?",
        model="Qwen/Qwen2.5-32B-Instruct",
        after="039",
    ),
    Experiment(
        "041",
        "temporal_clue",
        "a 70B, with hard clipping and three times the learning rate",
        "The best of the report.",
        model="unsloth/Llama-3.3-70B-Instruct",
        after="039",
        reported={**_CLIPPED, "lr": 6e-6, "tasks_per_iteration": 64, "cpu_offload": True},
    ),
    Experiment(
        "042",
        "nyt_connections",
        "Connections with the settings of 039",
        "Does it carry over to a task of words?",
        after="039",
    ),
    Experiment(
        "043",
        "zebra_grid",
        "zebra grids with a 32B and the settings of 039",
        "Does it carry over to grids?",
        model="Qwen/Qwen2.5-32B-Instruct",
        after="039",
        reported={"tasks_per_iteration": 64},
    ),
    Experiment(
        "044",
        "temporal_clue",
        "hard clipping, three times the learning rate, an early stop at -2.5",
        "The best for its size.",
        after="039",
        reported={**_CLIPPED, "lr": 6e-6, "early_stop": {"alpha": 0.992, "threshold": -2.5}},
    ),
    Experiment(
        "045",
        "temporal_clue",
        "a 72B",
        "Does size help further?",
        model="Qwen/Qwen2.5-72B-Instruct",
        after="039",
        reported={"tasks_per_iteration": 64, "cpu_offload": True},
    ),
    Experiment(
        "046",
        "temporal_clue",
        "a distilled 32B, in small iterations",
        "A reasoning model writes long answers: fewer of them, and a later early stop.",
        model=f"{_DISTILLED}-32B",
        after="039",
        reported={
            "tasks_per_iteration": 8,
            "samples_per_task": 24,
            "early_stop": {"alpha": 0.992, "threshold": -3.3},
        },
    ),
    Experiment(
        "047",
        "temporal_clue",
        "hard clipping at another learning rate",
        "The report calls the rate too large; its notebook has 1.2e-6, a fifth of 044's.",
        after="044",
        reported={"lr": 1.2e-6, **_EARLY_STOP},
    ),
    Experiment(
        "048",
        "temporal_clue",
        "implicit rewards of single tokens",
        "Which tokens made an answer right? A reward model learns it from outcomes (PRIME).",
        after="044",
        reported={"early_stop": {"alpha": 0.992, "threshold": -3.3}},
        ours={"token_rewards": "implicit", "implicit_beta": 0.05, "implicit_lr": 1e-6},
    ),
    Experiment(
        "049",
        "temporal_clue",
        "twice as many tasks",
        "Are implicit rewards better with more of them?",
        after="048",
        reported={"tasks_per_iteration": 64},
    ),
)
EXPERIMENTS = {one.number: one for one in _IN_ORDER}
"""By number, in order."""


def presets_of(recipe: str) -> dict[str, dict[str, Setting]]:
    """Return the settings of a recipe's experiments, by number."""
    return {one.number: one.settings() for one in _IN_ORDER if one.recipe == recipe}


def table() -> str:
    """Return the table of docs/reference/experiments.md. A value of ours has an asterisk."""
    head = ["no.", "recipe", "model, GPUs", "what changed, and why", "settings"]
    lines = [head, ["---"] * len(head)]
    lines += [
        [one.number, one.recipe, _machine(one), f"{one.changed}. {one.why}", _changes(one)]
        for one in _IN_ORDER
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _machine(one: Experiment) -> str:
    name = one.its_model.rpartition("/")[2]
    return f"{name}, {one.its_gpus}"


def _changes(one: Experiment) -> str:
    written = [f"as {one.after}"] if one.after is not None else []
    if one.overfit is not None:
        written.append(f"`--overfit {one.overfit}`")
    written += [f"`{name}` {_shown(value)}" for name, value in one.reported.items()]
    written += [f"`{name}` {_shown(value)}\\*" for name, value in one.ours.items()]
    return ", ".join(written)


def _shown(value: Setting) -> str:
    """Write a value as --set takes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {part}" for name, part in value.items()) + "}"
    if isinstance(value, str):
        return value
    return json.dumps(value)

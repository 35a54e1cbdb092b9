"""List the names for configs and command lines: objectives, task families, loggers.

Each name has an entry, a small object; it describes the code and loads none of it. ttrl's own
entries are in the tables below. Another package adds its entries in its pyproject.toml:

    [project.entry-points."ttrl.objectives"]
    mine = "my_package.entries:MINE"    # a ttrl.Objective

The groups are `ttrl.objectives`, `ttrl.tasks` and `ttrl.loggers` (docs/how-to/register.md). ttrl
loads an entry of another package only for a run with its name, so a broken package harms no other
run.
"""

import functools
import importlib.metadata
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from ttrl.errors import UserError, describe

E = TypeVar("E")


@dataclass(frozen=True)
class Objective:
    """A policy loss, as `objective` names it.

    >>> objective = Objective("my_package.losses:bounded", settings=("clip_high",))
    >>> objective.settings
    ('clip_high',)
    """

    loss: str
    """module:function. It returns the loss of each token [N], and facts about each by name
    (`ttrl.training.objective.losses`). Its parameters name its inputs: `logprobs_N`,
    `old_logprobs_N`, `advantages_N`, `samples_N`, `chosen_N`, and any of `settings`. With
    `samples_N`, all trained tokens of a sample are in the same call.
    """
    settings: tuple[str, ...] = ()
    """The settings of the policy loss for `loss` and `choose`; others are refused."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The meaning of null, by setting: of `settings`, and `aggregation` of the run."""
    choose: str | None = None
    """module:function. It chooses tokens of a whole optimizer step, bool [N], before the step; the
    loss takes them as `chosen_N`. Its parameters: `logprobs_N`, `old_logprobs_N`, `advantages_N`,
    `keys_N`, `seed`, and any of `settings` (`ttrl.training.objective.covariance`).
    """
    from_second_update: bool = False
    """Whether it differs from other objectives only from an iteration's second update on, when the
    policy has moved.
    """


@dataclass(frozen=True)
class TaskFamily:
    """Named tasks, such as for `ttrl eval`.

    >>> family = TaskFamily("my_package.riddles:get_tasks", score="right")
    >>> family.split
    'validation'
    """

    tasks: str
    """module:function. It takes (split, n, seed) and options by name, and returns tasks. It has an
    argument `path` if it loads data.
    """
    score: str = "reward"
    """The metric of correctness: its mean is called the accuracy; or "reward"."""
    split: str = "validation"
    """The default."""
    data: str | None = None
    """None: generated, no data needed; else the data set on the hub, or "" without a default.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Given to the function."""
    example: str = ""
    """An example of this family's many names: NAME in FAMILY:NAME, the function's first argument.
    """
    draws: bool = False
    """Whether `n` tasks are made from the data at `path`; otherwise all of it is loaded."""


@dataclass(frozen=True)
class Logger:
    """A logger of metrics, as `loggers` names it.

    >>> Logger("my_package.loggers:Csv", needs="pandas", arguments=("path",)).needs
    'pandas'
    """

    make: str
    """module:class, or a function. It takes the run (`ttrl.monitoring.loggers.LoggedRun`) and the
    arguments of the entry in `loggers`, and makes an object with `log_dict` and `close`.
    """
    needs: str | None = None
    """The package it needs beyond the installed ones."""
    arguments: tuple[str, ...] | None = None
    """The names of its arguments; None: any."""


@functools.cache
def _registered(group: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by plain name. `path`, for the cache, is the search
    path."""
    found: dict[str, list[EntryPoint]] = {}
    for one in importlib.metadata.entry_points(group=group):
        found.setdefault(_plain(one.name), []).append(one)
    return found


def _plain(name: str) -> str:
    """Return a name with underscores for dashes."""
    return name.replace("-", "_")


class Registry(Generic[E]):
    """The entries of one kind, by name. Dashes and underscores are the same in names."""

    def __init__(self, group: str, kind: type[E], own: Mapping[str, E]) -> None:
        self._group = group
        self._kind = kind
        self._own = own

    def _others(self) -> dict[str, list[EntryPoint]]:
        return _registered(self._group, tuple(sys.path))

    def names(self) -> list[str]:
        """Return all names, ttrl's own first."""
        return [*self._own, *sorted(self._others().keys() - self._own.keys())]

    def is_own(self, name: str) -> bool:
        """Tell whether the entry is ttrl's."""
        return _plain(name) in self._own

    def __contains__(self, name: str) -> bool:
        return self.is_own(name) or _plain(name) in self._others()

    def __getitem__(self, name: str) -> E:
        """Return the entry of a name. Raises UserError if there is none, if two packages claim the
        name, and if the entry cannot be loaded.
        """
        name = _plain(name)
        others = self._others().get(name, [])
        owners = ["ttrl"] * (name in self._own) + sorted(map(_package, others))
        if len(owners) > 1:
            raise UserError(
                f"{self._group}: {name!r} is claimed by {' and '.join(owners)}; rename the entry "
                "point of one, or uninstall it"
            )
        if name in self._own:
            return self._own[name]
        if not others:
            raise UserError(
                f"{self._group} has no {name!r}; choose one of {', '.join(self.names())}"
            )
        where = self.described(name)
        try:
            entry = others[0].load()
        except Exception as error:
            raise UserError(
                f"{where} cannot be loaded from {others[0].value}: {describe(error)}; fix that "
                "package, or uninstall it"
            ) from error
        if not isinstance(entry, self._kind):
            raise UserError(
                f"{where}: {others[0].value} is of type {type(entry).__name__}; it must be a "
                f"ttrl.{self._kind.__name__}"
            )
        return entry

    def described(self, name: str) -> str:
        """Return group, name and package of an entry, for errors."""
        if self.is_own(name):
            package = "ttrl"
        else:
            package = _package(self._others()[_plain(name)][0])
        return f"{self._group}: {_plain(name)!r} of {package}"

    def load(self, name: str, target: str) -> Any:
        """Return the object that the entry of this name calls module:name. Raises UserError."""
        try:
            return pkgutil.resolve_name(target)
        except Exception as error:
            raise UserError(
                f"{self.described(name)} names {target}, and it cannot be loaded: "
                f"{describe(error)}; fix that package, or uninstall it"
            ) from error


def _package(one: EntryPoint) -> str:
    if one.dist is None:
        return one.value
    return f"{one.dist.name} {one.dist.version}"


_LOSSES = "ttrl.training.objective.losses"
_CHOICES = "ttrl.training.objective.covariance"
OBJECTIVES = Registry(
    "ttrl.objectives",
    Objective,
    {
        "ppo": Objective(
            f"{_LOSSES}:clipped_ratio_loss", settings=("clip_low", "clip_high", "dual_clip")
        ),
        "reinforce": Objective(f"{_LOSSES}:reinforce_loss"),
        "tanh": Objective(f"{_LOSSES}:tanh_loss"),
        "gspo": Objective(
            f"{_LOSSES}:gspo_loss",
            settings=("clip_low", "clip_high"),
            defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"},
        ),
        "cispo": Objective(f"{_LOSSES}:cispo_loss", settings=("clip_low", "clip_high")),
        "clip_cov": Objective(
            f"{_LOSSES}:clip_cov_loss",
            settings=("clip_low", "clip_high", "covariance_share", "covariance_bounds"),
            choose=f"{_CHOICES}:clip_cov_choice",
        ),
        "kl_cov": Objective(
            f"{_LOSSES}:kl_cov_loss",
            settings=("covariance_share", "kl_cov_coefficient"),
            choose=f"{_CHOICES}:kl_cov_choice",
            from_second_update=True,
        ),
    },
)

FAMILIES = Registry(
    "ttrl.tasks",
    TaskFamily,
    {
        "gsm8k": TaskFamily("ttrl.tasks.gsm8k:get_gsm8k_tasks", "exact", "test", "openai/gsm8k"),
        "math": TaskFamily(
            "ttrl.tasks.math:get_math_tasks", "exact", "test", "DigitalLearningGmbH/MATH-lighteval"
        ),
        "aime": TaskFamily(
            "ttrl.tasks.math:get_aime_tasks", "exact", "test", "HuggingFaceH4/aime_2024"
        ),
        "dapo": TaskFamily(
            "ttrl.tasks.math:get_dapo_tasks", "exact", data="BytedTsinghua-SIA/DAPO-Math-17k"
        ),
        "mmlu": TaskFamily(
            "ttrl.tasks.multiple_choice:get_mmlu_tasks", split="test", data="cais/mmlu"
        ),
        "arc_challenge": TaskFamily(
            "ttrl.tasks.multiple_choice:get_arc_tasks",
            split="test",
            data="allenai/ai2_arc",
            options={"challenge": True},
        ),
        "arc_easy": TaskFamily(
            "ttrl.tasks.multiple_choice:get_arc_tasks",
            split="test",
            data="allenai/ai2_arc",
            options={"challenge": False},
        ),
        "humaneval": TaskFamily(
            "ttrl.tasks.humaneval:get_humaneval_tasks",
            split="test",
            data="openai/openai_humaneval",
        ),
        "arc_agi": TaskFamily("ttrl.tasks.arc_agi:get_arc_agi_tasks", "exact", "test", ""),
        "nyt_connections": TaskFamily(
            "ttrl.tasks.nyt_connections:get_nyt_connections_tasks", "exact", "test", ""
        ),
        "chess": TaskFamily("ttrl.tasks.chess_moves:get_chess_tasks", "best", "test", ""),
        "temporal_clue": TaskFamily("ttrl.tasks.temporal_clue:get_temporal_clue_tasks", "accuracy"),
        "zebra_grid": TaskFamily("ttrl.tasks.zebra_grid:get_zebra_grid_tasks", "solved"),
        "countdown": TaskFamily("ttrl.tasks.countdown:get_countdown_tasks", "exact"),
        "letter_counting": TaskFamily(
            "ttrl.tasks.letter_counting:get_letter_counting_tasks", "exact"
        ),
        "sort_letters": TaskFamily("ttrl.tasks.sort_letters:get_sort_letters_tasks", "exact"),
        "structured_output": TaskFamily(
            "ttrl.tasks.structured_output:get_structured_output_tasks", "exact"
        ),
        "spelling": TaskFamily("ttrl.tasks.spelling:get_spelling_tasks", "exact", draws=True),
        "reasoning_gym": TaskFamily(
            "ttrl.agents.reasoning_gym:get_reasoning_gym_tasks", "exact", example="chain_sum"
        ),
        "inspect_ai": TaskFamily(
            "ttrl.agents.inspect:get_inspect_tasks", split="test", example="package/task"
        ),
        "openenv": TaskFamily(
            "ttrl.agents.openenv:get_openenv_tasks", example="http://127.0.0.1:8000"
        ),
        "textarena": TaskFamily(
            "ttrl.agents.textarena:get_textarena_tasks", example="TowerOfHanoi-v0"
        ),
        "verifiers": TaskFamily("ttrl.agents.verifiers:get_verifiers_tasks", example="gsm8k-v1"),
    },
)

_LOGGERS = "ttrl.monitoring.loggers"
_TRACKERS = "ttrl.monitoring.trackers"
LOGGERS = Registry(
    "ttrl.loggers",
    Logger,
    {
        "stdout": Logger(f"{_LOGGERS}:Stdout", arguments=()),
        "tensorboard": Logger(
            f"{_LOGGERS}:TensorBoard", needs="tensorboard", arguments=("log_dir",)
        ),
        "wandb": Logger(f"{_TRACKERS}:WandB", needs="wandb"),
        "mlflow": Logger(
            f"{_TRACKERS}:MLflow",
            needs="mlflow",
            arguments=("tracking_uri", "experiment", "run_name", "tags"),
        ),
        "trackio": Logger(f"{_TRACKERS}:Trackio", needs="trackio"),
        "swanlab": Logger(f"{_TRACKERS}:SwanLab", needs="swanlab"),
    },
)

"""Choose machine settings for supervised training before or next to a run, and check the fit.

It takes over the run's device, dtype and GPUs. The planner treats it as a run on all GPUs, whose
servers sleep while it trains. So `ttrl.plans.open_choices` decides about processes and memory
settings here as well, with the same figures. On a CPU, memory is only estimated.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.configs.base import Settings
from ttrl.configs.machines import auto_dtype
from ttrl.configs.run import SET_BY_THE_LOOP, TrainConfig
from ttrl.costs.memory import IMPORTS, Workload, training_memory
from ttrl.errors import complaints
from ttrl.plans.open_choices import choose, refused
from ttrl.plans.open_settings import Choices
from ttrl.plans.plan_machine import gpus_here, host_here
from ttrl.plans.planner import read_model_config
from ttrl.ready_models import model_named
from ttrl.run_folder.folder import RunFolder
from ttrl.text import gib

_CHOSEN = ("rows_per_microbatch", "activation_checkpointing", "optimizer")
_SHARED = (GRPOConfig.names() & SFTConfig.names()) - set(SET_BY_THE_LOOP)
_NOT_OF_SFT = frozenset({"lr", "lr_schedule", "warmup_steps", "total_steps"})
_OF_THE_MACHINE = (
    "activation_checkpointing",
    "activation_offloading",
    "checkpoint_every",
    "checkpoint_keeps",
    "collective_timeout",
    "cpu_offload",
    "reshard_after_forward",
    "tensor_parallel",
)
"""Settings of a run inherited by its start: they change no more than rounding."""
_MORE_GPUS = (2, 4, 8, 16)
_SURELY = 1.3
"""Measured on CPUs, an estimate was 28% too high at the most."""


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
class Hardware:
    """Hold a run's hardware, in bytes."""

    gpus: Sequence[float]
    """Memory of each GPU; none: a CPU."""
    host: float
    """Memory of the machine."""

    @classmethod
    def of(cls, config: TrainConfig) -> "Hardware":
        gpus = [] if config.device == "cpu" else gpus_here()
        return cls(gpus, host_here())

    @property
    def cuda(self) -> bool:
        return bool(self.gpus)


@dataclass(frozen=True)
class Fitted:
    """Hold the final settings of supervised training."""

    settings: Settings
    """Of SFTConfig."""
    processes: int
    choices: Choices
    """Its memory, and the problem if it does not fit."""

    @property
    def is_sure(self) -> bool:
        """True unless a CPU's memory is near the estimate, whose errors reach 30%."""
        if self.choices.config.device != "cpu":
            return True
        return self.choices.trainer * self.processes > _SURELY * self.choices.memory

    def __str__(self) -> str:
        dtype = self.settings.get("dtype", "fp32")
        of = f"{gib(self.choices.trainer)} of {gib(self.choices.memory)}"
        return f"{_processes(self.processes)} in {dtype}, each with up to {of}"


def start_settings(config: TrainConfig, own: Settings, *, cuda: bool) -> Settings:
    """Return the settings of supervised training before a run: the run's device, dtype and memory
    settings if they differ from SFTConfig's defaults, then `own`.
    """
    given: dict[str, object] = {"device": config.device, "context": config.context}
    given["dtype"] = config.dtype
    if config.dtype == "auto":
        given["dtype"] = auto_dtype(cuda)
    if config.processes_here > 1 and not cuda:
        cores = os.cpu_count() or 1
        given["num_threads"] = config.num_threads or max(1, cores // config.processes_here)
    plain = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    settings = {name: value for name, value in given.items() if value != plain[name]}
    training = config.recipe_settings
    settings |= {name: training[name] for name in _OF_THE_MACHINE if name in training}
    return {"model": config.model, "seed": config.seed, **settings, **own}


def sft_settings(config: TrainConfig, own: Settings) -> Settings:
    """Return the settings of supervised training for comparison with a run: its trainer's except
    for the learning rate, then `own`.
    """
    shared = SFTConfig.names() - _NOT_OF_SFT
    training = config.recipe_settings
    settings = {name: training[name] for name in training if name in shared}
    for name in ("model", "seed", "device", "dtype", "num_threads"):
        settings[name] = getattr(config, name)
    settings["context"] = config.server.get("max_model_len")
    return {**settings, **own}


def setting_problems(name: str, settings: Settings) -> list[str]:
    """Return the faults in supervised training's settings, one line each after `name`."""
    values = {**settings, "data": "", "output_dir": "", "steps": 1}
    if values.get("dtype") == "auto":
        values["dtype"] = SFTConfig.dtype
    _, found = SFTConfig.examine(values)
    return [f"{name}: {problem}" for problem in found]


def fit_supervised(
    settings: Settings,
    config: TrainConfig,
    hardware: Hardware,
    run: Path | None = None,
) -> Fitted:
    """Choose the run config's open settings for the GPUs. If `run`, the folder of this training,
    exists, take its earlier choices.

    settings: of SFTConfig. Its rows per microbatch count on CPUs only: their author did not know
    the GPU. Raises ConfigError and ModelFolderError.
    """
    settings = dict(settings)
    processes = config.nproc_per_node
    if hardware.cuda:
        settings.pop("rows_per_microbatch", None)
        if "activation_checkpointing" not in config.recipe_settings:
            settings.pop("activation_checkpointing", None)
        saved = {} if run is None else RunFolder(run).config()
        if saved:
            known = saved["training"]
            settings |= {name: known[name] for name in _CHOSEN if name in known}
            processes = saved.get("nproc_per_node", 1)
    trainer = TrainConfig(
        run="",
        model=str(settings["model"]),
        iterations=1,
        device="cuda" if hardware.cuda else "cpu",
        dtype=settings.get("dtype", SFTConfig.dtype),
        seq_len=settings.get("seq_len", SFTConfig.seq_len),
        max_tokens=config.max_tokens,
        nproc_per_node=processes,
        placement="colocated" if hardware.cuda else "auto",
        servers=config.servers or None,
        server=config.server,
        weight_sync="sleep" if hardware.cuda else "auto",
        training={name: settings[name] for name in settings if name in _SHARED},
    )
    model = shape_of(trainer)
    if not hardware.cuda:
        return Fitted(settings, trainer.processes_here, _on_cpu(model, trainer, hardware.host))
    choices = _on_gpus(model, trainer, hardware)
    made = choices.config
    settings |= {name: made.recipe_settings[name] for name in _CHOSEN}
    return Fitted(settings, made.processes_here, choices)


def shape_of(config: TrainConfig) -> Mapping[str, Any]:
    """Return config.json of a run's model."""
    return read_model_config(model_named(config.model))


@dataclass(frozen=True)
class ArmsPlan:
    """Hold the needs of all arms, by their names."""

    runs: Mapping[str, Choices]
    supervised: Mapping[str, Fitted]

    def problems(self) -> list[str]:
        """Return the arms that cannot run, one line each, unless the user insists on trying."""
        every = dict(self.runs)
        every |= {name: one.choices for name, one in self.supervised.items() if one.is_sure}
        return [f"{name}: {why}" for name, choices in every.items() for why in refused(choices)]

    def notes(self) -> list[str]:
        """Return the arms that may not fit a CPU's memory, one line each."""
        near = {name: one for name, one in self.supervised.items() if not one.is_sure}
        return [
            f"{name}: {one.choices.problem}" for name, one in near.items() if one.choices.problem
        ]

    def __str__(self) -> str:
        lines = ["Supervised training"]
        for name, fitted in self.supervised.items():
            lines.append(f"  {name}: {fitted}")
            if fitted.choices.problem is not None:
                lines.append(f"! {name} {fitted.choices.problem}")
        return "\n".join(lines)


def _on_cpu(model: Mapping[str, Any], trainer: TrainConfig, host: float) -> Choices:
    recipe = trainer.recipe_config({"dtype": trainer.dtype})
    processes = trainer.processes_here
    ranks = max(1, processes // recipe.tensor_parallel)
    workload = Workload(row_length=trainer.seq_len, rows=16)
    peak = training_memory(model, recipe, workload, ranks=ranks).peak + IMPORTS
    problem = None
    if peak * processes > host:
        who = f"{_processes(processes)}, each with up to {gib(peak)}"
        problem = f"does not fit: {who}, and this machine has {gib(host)}"
    return Choices(trainer, trainer=peak, memory=host, problem=problem)


def _on_gpus(model: Mapping[str, Any], trainer: TrainConfig, hardware: Hardware) -> Choices:
    def made(config: TrainConfig, gpus: Sequence[float]) -> Choices:
        return choose(model, config, gpus, host=hardware.host, advise=False)

    choices = made(trainer, hardware.gpus)
    if choices.problem is None:
        return choices
    ways = []
    offloaded = {**trainer.recipe_settings, "cpu_offload": True}
    slow = dataclasses.replace(trainer, training=offloaded)
    allowed = not complaints(lambda: slow.recipe_config({}))
    if allowed and made(slow, hardware.gpus).problem is None:
        ways.append("cpu_offload: true (slow)")
    on_all = dataclasses.replace(trainer, nproc_per_node=None)
    for count in _MORE_GPUS:
        more = [min(hardware.gpus)] * count
        if count > len(hardware.gpus) and made(on_all, more).problem is None:
            ways.append(f"{count} such GPUs")
            break
    if not ways:
        return choices
    problem = f"{choices.problem}; what would fit: {'; or '.join(ways)}"
    return dataclasses.replace(choices, problem=problem)


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"

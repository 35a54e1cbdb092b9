"""Settings of a run about being watched: when sampler and trainer are too far apart, and where metrics go."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ttrl.configs.base import Config
from ttrl.configs.loggers import logger_problems

LIMIT_NAMES = ("mean", "p999", "ess", "outside")
"""What `drift_limits` may hold."""


@dataclass(kw_only=True)
class WatchingConfig(Config):
    """A part of TrainConfig."""

    drift: Literal["stop", "warn"] = "stop"
    """What becomes of a run whose sampler and trainer are further apart than rounding explains (`drift_limits`): it ends with the
    worst tokens and the likely causes, or says so and goes on."""
    drift_limits: dict[str, Any] = field(default_factory=dict)
    """Instead of the limits by dtype and device (ttrl/monitoring/drift.py): {"mean": nats, "p999": nats, "ess": share, "outside":
    share}; null for no limit. Held to them are tokens that were compared under the weights that sampled them, and no others."""
    loggers: list[Any] = field(default_factory=list)
    """Where each iteration's metrics go beside metrics.jsonl: "stdout", "tensorboard", "wandb", or a mapping with arguments, such
    as {"name": "wandb", "project": "sorting", "mode": "offline"} or, with torchtune's names for its own loggers,
    {"_component_": "torchtune.training.metric_logging.TensorBoardLogger", "log_dir": "logs"}. See docs/watching.md."""

    def watch_problems(self) -> list[str]:
        """What is wrong with them, one line each."""
        found = []
        for name, value in self.drift_limits.items():
            if name not in LIMIT_NAMES:
                found.append(f"drift_limits: unknown limit {name!r}; there are {', '.join(LIMIT_NAMES)}")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                found.append(f"drift_limits: {name} is {value!r}; it must be above 0, or null for no limit")
        return found + [problem for entry in self.loggers for problem in logger_problems(entry)]

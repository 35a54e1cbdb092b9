"""Send metrics to more than metrics.jsonl: the terminal, TensorBoard, trackers such as W&B
(`ttrl.monitoring.trackers`), torchtune's loggers, any class with a log_dict.

metrics.jsonl is the source. Each logger gets every row once, even after a crash or if added to a
run later: logs/loggers.json records each logger's rows after logging them. A crash in between
repeats at most one iteration; TensorBoard, W&B and MLflow replace or ignore the same step. A
failing logger is reported once and never stops a run.
"""

import contextlib
import functools
import logging
import math
import numbers
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ttrl.configs.base import without_secrets
from ttrl.configs.logger_settings import normalised
from ttrl.errors import ConfigError, describe, raised_in
from ttrl.facts import MetricsRow, Step
from ttrl.registries import LOGGERS
from ttrl.run_folder.metrics import STATE_FILE, read_seen
from ttrl.system.console import Console
from ttrl.system.files import write_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """The required interface of a logger: the part used here of torchtune's
    (torchtune.training.metric_logging).
    """

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Log all metrics of an iteration, by flat names."""

    def close(self) -> None:
        """Finish; no more calls follow."""


def flattened(row: MetricsRow | Step) -> dict[str, float]:
    """Return the finite numbers of a row of metrics.jsonl or train.jsonl by flat names,
    "train/entropy".
    """
    return {
        name: float(value)
        for name, value in row.by_name("/").items()
        if isinstance(value, numbers.Real) and math.isfinite(value) and name != "iteration"
    }


class Loggers:
    """All loggers of a run, created by `make_loggers`."""

    def __init__(self, named: Sequence[tuple[str, MetricLogger]], state: Path) -> None:
        self._named = list(named)
        self._path = state
        self._failed: set[str] = set()
        self._seen = read_seen(state)

    def log(self, rows: Sequence[MetricsRow]) -> None:
        """Give each logger its unseen rows, in order. Call it after each iteration. Never
        raises.
        """
        before = dict(self._seen)
        for name, one in self._named:
            for row in sorted(rows, key=lambda row: row.iteration):
                if row.iteration <= self._seen.get(name, -1):
                    continue
                if not self._guarded(
                    name, functools.partial(one.log_dict, flattened(row), row.iteration)
                ):
                    break  # try again with the next iteration
                self._seen[name] = row.iteration
        if self._seen != before:
            with contextlib.suppress(OSError):
                write_json(self._path, {"seen": self._seen})

    def log_step(self, step: Step) -> None:
        """Give each logger a step of a recipe, by its number in the optimizer's state. Never
        raises.
        """
        for name, one in self._named:
            self._guarded(
                name, functools.partial(one.log_dict, flattened(step), step.global_step or 0)
            )

    def close(self) -> None:
        """Let the loggers flush their data. Never raises."""
        for name, one in self._named:
            self._guarded(name, one.close)
        self._named = []

    def _guarded(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            # A logger may be any code; a run must not end because of its metrics.
            if name not in self._failed:
                self._failed.add(name)
                logger.warning(
                    "the logger %s failed; the run continues without it: %s%s",
                    name,
                    describe(error),
                    raised_in(error),
                )
            return False
        self._failed.discard(name)
        return True


@dataclass(frozen=True)
class LoggedRun:
    """A run, as given to a logger of the registry."""

    folder: Path
    console: Console
    config: Mapping[str, Any]
    """The settings of the run. They may hold secrets (`ttrl.configs.base.without_secrets`)."""
    unit: str = "iteration"
    """What a row is about: an iteration of a run, or an optimizer "step" of a recipe."""


def make_loggers(
    entries: Sequence[Any],
    folder: Path,
    console: Console,
    config: Mapping[str, Any],
    unit: str = "iteration",
) -> Loggers:
    """Create the loggers of a run in `folder` from `TrainConfig.loggers`; W&B shows `config` as the
    run's. Raises ConfigError with a remedy if one cannot be made."""
    run = LoggedRun(folder, console, config, unit)
    made: list[tuple[str, MetricLogger]] = []
    problems = []
    for number, entry in enumerate(entries):
        try:
            name, arguments = normalised(entry)
            one = _make(name, arguments, run)
            if name in dict(made):
                name = f"{name} {number}"
            made.append((name, one))
        except (ValueError, ConfigError) as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - the constructor of any class
            problems.append(
                f"loggers: {without_secrets(entry)!r} cannot be made: {type(error).__name__}: "
                f"{error}"
            )
    loggers = Loggers(made, folder / "logs" / STATE_FILE)
    if problems:
        loggers.close()
        raise ConfigError("TrainConfig", problems)
    return loggers


def _make(name: str, arguments: Mapping[str, Any], run: LoggedRun) -> MetricLogger:
    one: MetricLogger
    if name in LOGGERS:
        one = LOGGERS.load(name, LOGGERS[name].make)(run, **arguments)
    else:
        if "log_dir" in arguments:
            folder = Path(arguments["log_dir"])
            if not folder.is_relative_to(run.folder):  # as ${output_dir}/logs is in a recipe's
                folder = run.folder / folder
            arguments = {**arguments, "log_dir": str(folder)}
        one = pkgutil.resolve_name(name)(**arguments)
    methods = {"log_dict": "log_dict(payload, step)", "close": "close()"}
    missing = [call for method, call in methods.items() if not callable(getattr(one, method, None))]
    if missing:
        raise ValueError(
            f"loggers: {name} has no {' and no '.join(missing)}; give a class with torchtune's "
            "logger interface"
        )
    return one


class Stdout:
    """Writes a line with every metric for each iteration or step."""

    def __init__(self, run: LoggedRun) -> None:
        self._console = run.console
        self._unit = run.unit

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        self._console.line(
            f"{self._unit} {step}: "
            + " ".join(f"{name}={value:.6g}" for name, value in payload.items())
        )

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes one folder of event files for the run; TensorBoard purges steps logged by an
    interrupted process beyond its next one.
    """

    def __init__(self, run: LoggedRun, log_dir: str | None = None) -> None:
        self._log_dir = Path(log_dir or run.folder / "logs" / "tensorboard")
        self._writer: SummaryWriter | None = None

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._log_dir), purge_step=step)
        for name, value in payload.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

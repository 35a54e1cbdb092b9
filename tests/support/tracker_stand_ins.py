"""Stand-ins for wandb, mlflow, trackio and swanlab: their calls' signatures, and what they keep of a
run. The real packages are tried in tests/monitoring/test_trackers.py where they are installed.
"""

import re
import signal
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MLFLOW_REFUSES = re.compile(r"[^\w\-. :/]", re.ASCII)


@dataclass
class Kept:
    """A tracker's run: its settings, rows by step, how each process ended it, and the words of
    the command line it saw.
    """

    config: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


class Trackers:
    """What all four keep, by tracker and run."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Kept]] = {}
        self.modules = {
            "wandb": SimpleNamespace(init=self._wandb, Settings=SimpleNamespace),
            "mlflow": SimpleNamespace(MlflowClient=self._mlflow, entities=SimpleNamespace(
                Metric=lambda key, value, timestamp, step: SimpleNamespace(
                    key=key, value=value, timestamp=timestamp, step=step
                ),
                Param=lambda key, value: SimpleNamespace(key=key, value=value),
            )),
            "trackio": SimpleNamespace(init=self._trackio, finish=self._finish_trackio),
            "swanlab": SimpleNamespace(init=self._swanlab, Settings=_SwanSettings),
        }  # fmt: skip

    def _kept(self, tracker: str, name: str, config: dict[str, Any]) -> Kept:
        sys.stdout.write(f"* {tracker} says hello\n")
        kept = self.runs.setdefault(tracker, {}).setdefault(name, Kept())
        kept.config = {**config, **kept.config}
        kept.words = list(sys.argv)
        return kept

    def _wandb(self, *, project, name, dir, id, resume, config, settings):
        assert resume == "allow" and settings.console == "off"
        kept = self._kept("wandb", id, config)
        return SimpleNamespace(
            log=lambda data, step=None: kept.rows.append((step, data)),
            finish=lambda exit_code=None: kept.ends.append("failed" if exit_code else "well"),
        )

    def _trackio(self, project, name=None, *, config=None, resume="never", embed=True):
        assert resume == "allow" and not embed
        kept = self._kept("trackio", name, config)
        self._current = kept
        return SimpleNamespace(log=lambda metrics, step=None: kept.rows.append((step, metrics)))

    def _finish_trackio(self):
        self._current.ends.append("well")

    def _swanlab(self, *, project, name, log_dir, id, resume, settings, config, mode=None):
        assert resume == "allow" and settings.terminal.proxy_type == "none"
        signal.signal(signal.SIGINT, lambda *_: None)
        sys.excepthook = lambda *_: None
        kept = self._kept("swanlab", id, config)

        def finish(state="success", error=None):
            kept.ends.append({"success": "well", "crashed": "failed"}.get(state, state))

        return SimpleNamespace(
            log=lambda data, step=None: kept.rows.append((step, data)), finish=finish
        )

    def _mlflow(self, tracking_uri=None):
        return _MlflowClient(self, tracking_uri)


class _SwanSettings(SimpleNamespace):
    Terminal = SimpleNamespace
    Probe = SimpleNamespace


class _MlflowClient:
    """One experiment, "ttrl". Names the server refuses are refused here."""

    def __init__(self, trackers: Trackers, tracking_uri: str | None) -> None:
        self._trackers = trackers

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "1"

    def create_run(self, experiment_id, *, run_name=None, tags=None):
        runs = self._trackers.runs.setdefault("mlflow", {})
        name = f"run{len(runs)}"
        self._trackers._kept("mlflow", name, {})
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def _run(self, run_id):
        return self._trackers.runs["mlflow"][run_id]

    def update_run(self, run_id, status=None):
        self._run(run_id)

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(params=self._run(run_id).config))

    def get_metric_history(self, run_id, key):
        return [
            SimpleNamespace(step=step, value=row[key])
            for step, row in self._run(run_id).rows
            if key in row
        ]

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        kept = self._run(run_id)
        for one in (*metrics, *params):
            if MLFLOW_REFUSES.search(one.key):
                raise ValueError(f"Invalid value {one.key!r}")
        for one in params:
            if kept.config.setdefault(one.key, one.value) != one.value:
                raise ValueError(f"Changing param values is not allowed: {one.key}")
        if metrics:
            kept.rows.append((metrics[0].step, {one.key: one.value for one in metrics}))

    def set_terminated(self, run_id, status=None):
        ends = {"FINISHED": "well", "FAILED": "failed", "KILLED": "aborted"}
        self._run(run_id).ends.append(ends[status])

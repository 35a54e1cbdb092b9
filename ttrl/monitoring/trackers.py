"""Log a run folder as one run of a tracker: W&B, MLflow, trackio or SwanLab.

logs/NAME_id.json holds the tracker's run, so a continued run appends to it. Texts with a secret's
name become `***` in the config, and so do words of the command line that could be secrets. Keys
belong in the trackers' own environment variables. A run that fails is marked so where the tracker
can show it.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ttrl.configs.base import without_secrets
from ttrl.monitoring.loggers import LoggedRun
from ttrl.run_folder.owner import shown_words
from ttrl.system.files import read_object, write_json


def _remembered_id(run: LoggedRun, tracker: str, make: Callable[[], str]) -> str:
    """Return the id of the tracker's run; `make` makes it for a new one."""
    path = run.folder / "logs" / f"{tracker}_id.json"
    try:
        return str(read_object(path)["id"])
    except (OSError, ValueError, KeyError, TypeError):
        made = make()
        write_json(path, {"id": made})
        return made


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep a tracker's start from doing more than it should.

    It stores and uploads the command line, so possible secrets there are hidden. It prints to
    standard output, which belongs to the person. It may take over Ctrl-C and the printing of
    errors, which end a run in order.
    """
    words = sys.argv
    excepthook = sys.excepthook
    is_main = threading.current_thread() is threading.main_thread()
    interrupt = signal.getsignal(signal.SIGINT)
    sys.argv = shown_words(words)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = words
        sys.excepthook = excepthook
        if is_main:
            signal.signal(signal.SIGINT, interrupt)


def _failure() -> type[BaseException] | None:
    """Return the kind of error that ends the run; None if it ends well."""
    return sys.exc_info()[0]


class _LogsSteps:
    """Logs metrics with the tracker's own run."""

    _run: Any

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        self._run.log(dict(payload), step=step)


class WandB(_LogsSteps):
    """Logs a run folder as one W&B run. W&B ignores steps already seen. Arguments go to
    wandb.init.
    """

    def __init__(self, run: LoggedRun, **arguments: Any) -> None:
        import wandb

        logs = run.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        given = {
            "project": "ttrl",
            "name": run.folder.name,
            "dir": str(logs),
            "id": _remembered_id(run, "wandb", _new_id),
            "resume": "allow",
            # Its console capture would take over the person's standard output.
            "settings": wandb.Settings(console="off", silent=True),
            "config": without_secrets(run.config),
        }
        with _quietly():
            self._run = wandb.init(**(given | arguments))

    def close(self) -> None:
        if _failure() is None:
            self._run.finish()
        else:
            self._run.finish(exit_code=1)


class MLflow:
    """Logs a run folder as one MLflow run: to `tracking_uri`, or where MLFLOW_TRACKING_URI says.

    It uses a client of its own, so it does not touch the script's active MLflow run.
    """

    _METRICS = 1000
    _PARAMETERS = 100
    _NAME_LENGTH = 250
    """The server's limits, for a request and for a name."""
    _ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)

    def __init__(
        self,
        run: LoggedRun,
        tracking_uri: str | None = None,
        experiment: str = "ttrl",
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        if tracking_uri is not None and urllib.parse.urlsplit(tracking_uri).password:
            raise ValueError(
                "loggers: mlflow's tracking_uri holds a password, and config.yaml would keep it; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        # MLflow's own limits stop a run for minutes at each iteration if the server is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        with _quietly():
            from mlflow import MlflowClient, entities

            self._entities = entities
            self._client = MlflowClient(tracking_uri=tracking_uri)
            known = self._client.get_experiment_by_name(experiment)
            if known is None:
                place = self._client.create_experiment(experiment)
            else:
                place = known.experiment_id

            def make() -> str:
                name = run_name or run.folder.name
                made = self._client.create_run(place, run_name=name, tags=dict(tags or {}))
                return str(made.info.run_id)

            self._run_id = _remembered_id(run, "mlflow", make)
            self._client.update_run(self._run_id, status="RUNNING")
            self._log_config(run.config)
        self._is_new_here = True

    def _log_config(self, config: Mapping[str, Any]) -> None:
        """Log the settings as parameters. MLflow refuses to change one, so a setting changed while
        the run was continued keeps its first value there.
        """
        known = self._client.get_run(self._run_id).data.params
        settings = {self._name(n): v for n, v in _flat_settings(without_secrets(config))}
        new = [self._entities.Param(n, v) for n, v in settings.items() if n not in known]
        for first in range(0, len(new), self._PARAMETERS):
            self._client.log_batch(self._run_id, params=new[first : first + self._PARAMETERS])

    def _name(self, name: str) -> str:
        """Return a name with `_` for the characters MLflow refuses; one refused name would lose
        the whole row.
        """
        return self._ALLOWED.sub("_", name)[: self._NAME_LENGTH]

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        metrics = {self._name(name): value for name, value in payload.items()}
        if self._is_new_here and metrics:
            # The process before may have been killed between logging a row and noting so.
            history = self._client.get_metric_history(self._run_id, next(iter(metrics)))
            self._is_new_here = False
            if any(one.step == step for one in history):
                return
        now = int(time.time() * 1000)
        points = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        for first in range(0, len(points), self._METRICS):
            self._client.log_batch(self._run_id, metrics=points[first : first + self._METRICS])

    def close(self) -> None:
        failure = _failure()
        if failure is None:
            status = "FINISHED"
        elif issubclass(failure, KeyboardInterrupt):
            status = "KILLED"
        else:
            status = "FAILED"
        self._client.set_terminated(self._run_id, status=status)


def _flat_settings(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings as texts by flat names, "training/lr"."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat_settings(value, f"{before}{name}/")
        elif isinstance(value, str):
            yield f"{before}{name}", value
        else:
            yield f"{before}{name}", json.dumps(value, default=str)


class Trackio(_LogsSteps):
    """Logs a run folder as one trackio run, by default on this machine (`trackio show`).
    Arguments go to trackio.init. A process has one run of trackio at a time.
    """

    def __init__(self, run: LoggedRun, **arguments: Any) -> None:
        # A run of trackio is its name, and other run folders may have this one's.
        name = _remembered_id(run, "trackio", lambda: f"{run.folder.name}-{_new_id()[:6]}")
        given = {"project": "ttrl", "name": name, "resume": "allow", "embed": False}
        given["config"] = without_secrets(run.config)
        with _quietly():
            import trackio

            self._finish = trackio.finish  # at exit, trackio would finish a run's own end again
            self._run = trackio.init(**(given | arguments))

    def close(self) -> None:
        with _quietly():
            self._finish()


class SwanLab(_LogsSteps):
    """Logs a run folder as one SwanLab run. Arguments go to swanlab.init, such as
    mode="offline".
    """

    def __init__(self, run: LoggedRun, **arguments: Any) -> None:
        with _quietly():
            import swanlab

            # It would take over the person's standard output, wait for a person to type a key, and
            # store the command line as /proc has it and the address of git's remote.
            settings = swanlab.Settings(
                interactive=False,
                terminal=swanlab.Settings.Terminal(proxy_type="none"),
                probe=swanlab.Settings.Probe(runtime=False, git=False),
            )
            given = {
                "project": "ttrl",
                "name": run.folder.name,
                "log_dir": str(run.folder / "logs" / "swanlab"),
                "id": _remembered_id(run, "swanlab", _new_id),
                "resume": "allow",
                "settings": settings,
                "config": without_secrets(run.config),
            }
            self._run = swanlab.init(**(given | arguments))

    def close(self) -> None:
        failure = _failure()
        with _quietly():
            if failure is None:
                self._run.finish()
            elif issubclass(failure, KeyboardInterrupt):
                self._run.finish(state="aborted", error=failure.__name__)
            else:
                self._run.finish(state="crashed", error=failure.__name__)

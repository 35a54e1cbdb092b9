"""The run on a cluster: a detached actor of the run's name, which outlives the program that began
it and its own machine.

Ray starts it again elsewhere when its machine dies. It then takes the run over, once the owner
before gives no sign of life (`ttrl.run_folder.lease`): whatever that one still writes belongs to an
older epoch, and counts for nothing.
"""

import logging
import os
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import cloudpickle

from ttrl.cluster import AUTHENTICATION
from ttrl.cluster.connection import (
    ASK_SECONDS,
    NAMESPACE,
    START_SECONDS,
    Words,
    actor_class,
    as_words,
    connect,
    end_actors,
    from_words,
    has_gpus,
)
from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError, RunFolderInUseError, TrainerError, UserError
from ttrl.system.console import Console

logger = logging.getLogger(__name__)

_TAKE_OVER_SECONDS = 120.0
"""For which one that was started again waits for the owner before to fall silent."""
_KILLED_SECONDS = 20.0
"""For which a new one waits: an owner that Ctrl-C killed looks alive from another machine for 16 s.
"""
_LOOK_SECONDS = 0.5
_LEFT_SECONDS = 10.0
"""After which a run that nobody asked for is left alone, and another program may wait for it."""
_LARGEST = 90 * 1000**2
"""Bytes of an actor's class; Ray takes 95 MB."""


class Lead:
    """Runs `work(**arguments)` in a thread; also again, when Ray starts it anew."""

    def __init__(
        self,
        config: TrainConfig,
        work: Callable[..., Any],
        arguments: Mapping[str, Any],
        accepts_open: bool,
    ) -> None:
        self._config, self._asked = config, time.monotonic()
        self._done: tuple[Any, Words | None] | None = None
        # Of what Ray calls within.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        threading.Thread(
            target=self._run,
            args=(work, dict(arguments), accepts_open, again),
            name="run",
            daemon=True,
        ).start()

    def _run(
        self, work: Callable[..., Any], arguments: dict[str, Any], accepts_open: bool, again: bool
    ) -> None:
        try:
            if AUTHENTICATION != "token" and not accepts_open:
                raise UserError(
                    "this Ray cluster asks for no token: whoever reaches its ports can run "
                    "programs as you. Start it with "
                    "RAY_AUTH_MODE=token on each machine, or say RAY_AUTH_MODE=disabled here to "
                    "accept that"
                )
            deadline = time.monotonic() + (_TAKE_OVER_SECONDS if again else _KILLED_SECONDS)
            # The name admits one lead; an owner that lives is refused all the same.
            arguments["take_over"] = True
            while True:
                try:
                    result = work(**arguments)
                    end_actors()  # also where nobody asks for the result any more
                    self._done = result, None
                    return
                except RunFolderInUseError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOK_SECONDS)
        except BaseException as error:
            logger.exception("the run ended")
            end_actors()
            self._done = None, as_words(error)

    def done(self) -> tuple[Any, Words | None] | None:
        """Return (result, what went wrong), or None while it runs."""
        self._asked = time.monotonic()
        return self._done

    def looked_at(self, config: TrainConfig) -> tuple[bool, str | None]:
        """Return whether it is done, and why a program with this config may not wait for it, or
        None.
        """
        if time.monotonic() - self._asked < _LEFT_SECONDS:
            return self._done is not None, "another program waits for it"
        return self._done is not None, None if config == self._config else "it has other settings"

    def where(self) -> tuple[str, int]:
        """Return its machine and process."""
        return ray.util.get_node_ip_address(), os.getpid()


def lead_name(run: str | os.PathLike[str]) -> str:
    """Return what the run's actor is called, in the namespace "ttrl"."""
    return f"run {os.path.abspath(run)}"


def run_detached(
    config: TrainConfig, work: Callable[..., Any], arguments: Mapping[str, Any], console: Console
) -> Any:
    """Run `work(**arguments)`, the run of `config`, as an actor of the cluster; return its result
    when it is done.

    Ctrl-C ends the run; when this process is killed it goes on, and the next one waits for it.
    Raises RunFolderError where the run is running already and another process waits, and what it
    raises.
    """
    assert config.cluster is not None
    connect(config.cluster)
    actor, is_new = _begin(config, work, arguments, console)
    if not is_new:
        console.line(
            "the run runs already, and nobody waited for it; what it says from now on is in "
            f"{config.run}/report.html"
        )
    console.line(
        f"the run is led by the actor {lead_name(config.run)!r} of the cluster; it goes on when "
        "this process is killed"
    )
    patience = max(config.join_timeout, START_SECONDS)
    try:
        if is_new and not ray.wait([actor.__ray_ready__.remote()], timeout=patience)[0]:
            raise TrainerError(
                f"the lead of {config.run} has not started within {patience:.0f} s: it takes "
                f"{_wanted(config)} of one machine, "
                "and `ray status` shows what is free; ask for fewer GPUs (nproc_per_node), or "
                "wait longer (join_timeout)"
            )
        while (done := _answer(config, actor.done.remote(), None)) is None:
            time.sleep(_LOOK_SECONDS)
    finally:  # also after Ctrl-C
        ray.kill(actor)
    result, words = done
    if words is not None:
        raise from_words(words)
    return result


def _answer(config: TrainConfig, asked: Any, silent: Any) -> Any:
    """Return a lead's answer, or `silent` while it is being started again elsewhere."""
    try:
        return ray.get(asked, timeout=ASK_SECONDS)
    except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
        return silent
    except ray.exceptions.RayError as error:
        raise TrainerError(
            f"the lead of {config.run} is gone for good: {error}; the same command continues the "
            "run"
        ) from error


def _lead_of(*given: Any) -> type[Lead]:
    """Return the class of a lead that has its arguments within. Ray keeps classes in the cluster's
    head, while arguments of some size stay with who gave them, after whose death the lead could not
    be started again. Raises UserError for too large ones.
    """
    packed = zlib.compress(cloudpickle.dumps(given))
    if len(packed) > _LARGEST:
        raise UserError(
            f"the tasks take {len(packed) / 1e6:.0f} MB, compressed, and a cluster keeps at most "
            f"{_LARGEST / 1e6:.0f} MB of a "
            "run; let tasks hold less, and graders read what is large from files that all "
            "machines see"
        )

    class RunLead(Lead):
        def __init__(self) -> None:
            super().__init__(*cloudpickle.loads(zlib.decompress(packed)))

    return RunLead


def _wanted(config: TrainConfig) -> dict[str, int]:
    """Return what a lead takes of its machine: one machine's trainer is its own."""
    return {
        "num_cpus": 1,
        "num_gpus": config.processes_here if config.nnodes == 1 and has_gpus(config) else 0,
    }


def _begin(
    config: TrainConfig, work: Callable[..., Any], arguments: Mapping[str, Any], console: Console
) -> tuple[Any, bool]:
    """Return the run's actor, and whether it was started now: one that nobody waits for any more is
    joined. Raises RunFolderError where there is one that may not be, and what `_lead_of` raises."""
    name = lead_name(config.run)
    kind = _lead_of(config, work, arguments, os.environ["RAY_AUTH_MODE"] != "token")
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        **_wanted(config),
    }
    for _ in range(20):
        try:
            actor = actor_class(kind, **options).remote()
            actor.__ray_ready__.remote()  # by ray:// a name that is taken is only said now
            return actor, True
        except ValueError:  # the name is taken
            try:
                other = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                time.sleep(_LOOK_SECONDS)
                continue
        is_done, why_not = _answer(
            config, other.looked_at.remote(config), (False, "it does not answer just now")
        )
        if is_done:
            _, words = _answer(config, other.done.remote(), (None, None))
            if words is not None:
                console.line(f"note: the run ended while nobody waited for it: {words[1]}")
            ray.kill(other)  # done, and nobody asked
            time.sleep(_LOOK_SECONDS)
        elif why_not is None:
            return other, False
        else:
            raise RunFolderError(
                f"{config.run} is being run by this cluster already, by its actor {name!r}, and "
                f"{why_not}; to end it: "
                f"ray kill-actor --name {name!r} --namespace {NAMESPACE} --force --no-restart"
            )
    raise RunFolderError(
        f"the name {name!r} of an actor that is done stays taken; try again, or restart the cluster"
    )

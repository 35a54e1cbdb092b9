"""Lead a run on a cluster from a detached actor of the run's name. It outlives the program behind
it and its own machine.

Ray restarts it elsewhere when its machine dies. It then takes over the run once the previous owner
gives no sign of life (`ttrl.run_folder.lease`). Later writes of the previous owner belong to an
older epoch and do not count.
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
from ttrl.cluster.ray_connection import (
    ASK_SECONDS,
    NAMESPACE,
    RAY,
    START_SECONDS,
    Cluster,
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
"""Seconds a restarted lead waits for the previous owner to fall silent."""
_KILLED_SECONDS = 20.0
"""Seconds a new lead waits: an owner killed by Ctrl-C looks alive from another machine for 16 s."""
_LOOK_SECONDS = 0.5
_LEFT_SECONDS = 10.0
"""Seconds without a query until another program may wait for the run."""
_LARGEST = 90 * 1000**2
"""Maximum bytes of an actor's class; Ray takes 95 MB."""


class Lead:
    """Run `work(**arguments)` in a thread; again after a restart by Ray."""

    def __init__(
        self,
        config: TrainConfig,
        work: Callable[..., Any],
        arguments: Mapping[str, Any],
        accepts_open: bool,
        *,
        again: bool = False,
        authentication: str = AUTHENTICATION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """again: whether Ray restarted it. authentication: RAY_AUTH_MODE of the cluster."""
        self._clock, self._authentication = clock, authentication
        self._config, self._asked = config, clock()
        self._done: tuple[Any, Words | None] | None = None
        threading.Thread(
            target=self._run,
            args=(work, arguments, accepts_open, again),
            name="run",
            daemon=True,
        ).start()

    def _run(
        self,
        work: Callable[..., Any],
        arguments: Mapping[str, Any],
        accepts_open: bool,
        again: bool,
    ) -> None:
        try:
            if self._authentication != "token" and not accepts_open:
                raise UserError(
                    "this Ray cluster needs no token: anyone with access to its ports can run "
                    "programs as you. Start it with RAY_AUTH_MODE=token on each machine, or set "
                    "RAY_AUTH_MODE=disabled here to accept this"
                )
            deadline = self._clock() + (_TAKE_OVER_SECONDS if again else _KILLED_SECONDS)
            while True:
                try:
                    # The actor's name admits one lead; a live owner is still refused.
                    result = work(**{**arguments, "take_over": True})
                    end_actors()  # even if the result is never fetched
                    self._done = result, None
                    return
                except RunFolderInUseError:
                    if self._clock() > deadline:
                        raise
                    time.sleep(_LOOK_SECONDS)
        except BaseException as error:
            logger.exception("the run ended")
            end_actors()
            self._done = None, as_words(error)

    def done(self) -> tuple[Any, Words | None] | None:
        """Return (result, error), or None while it runs."""
        self._asked = self._clock()
        return self._done

    def looked_at(self, config: TrainConfig) -> tuple[bool, str | None]:
        """Return (is done, reason why a program with this config may not wait for it, or None)."""
        if self._clock() - self._asked < _LEFT_SECONDS:
            return self._done is not None, "another program waits for it"
        return self._done is not None, None if config == self._config else "it has other settings"

    def where(self) -> tuple[str, int]:
        """Return its machine and process."""
        return ray.util.get_node_ip_address(), os.getpid()


def lead_name(run: str | os.PathLike[str]) -> str:
    """Return the name of the run's actor, in the namespace "ttrl"."""
    return f"run {os.path.abspath(run)}"


def run_detached(
    config: TrainConfig,
    work: Callable[..., Any],
    arguments: Mapping[str, Any],
    console: Console,
    cluster: Cluster = RAY,
) -> Any:
    """Run `work(**arguments)`, the run of `config`, as an actor of the cluster; return its result.

    Ctrl-C ends the run. If this process is killed, the run continues and the next process waits for
    it. Raises RunFolderError if the run is active and another process waits for it, and the run's
    own errors.
    """
    assert config.cluster is not None
    connect(config.cluster, cluster)
    actor, is_new = _begin(config, work, arguments, console, cluster)
    if not is_new:
        console.line(
            "the run is already active, and no program waited for it; its further output is in "
            f"{config.run}/report.html"
        )
    console.line(
        f"the run continues in the cluster's actor {lead_name(config.run)!r} if this process is "
        "killed"
    )
    patience = max(config.join_timeout, START_SECONDS)
    try:
        if is_new and not cluster.wait([actor.__ray_ready__.remote()], timeout=patience)[0]:
            raise TrainerError(
                f"the lead of {config.run} has not started within {patience:.0f} s: it needs "
                f"{_wanted(config)} of one machine; `ray status` lists free resources. Ask for "
                "fewer GPUs (nproc_per_node), or wait longer (join_timeout)"
            )
        while (done := _answer(config, actor.done.remote(), None, cluster)) is None:
            time.sleep(_LOOK_SECONDS)
    finally:  # also after Ctrl-C
        cluster.kill(actor)
    result, words = done
    if words is not None:
        raise from_words(words)
    return result


def _answer(config: TrainConfig, asked: Any, silent: Any, cluster: Cluster) -> Any:
    """Return a lead's answer, or `silent` while Ray restarts it elsewhere."""
    try:
        return cluster.get(asked, timeout=ASK_SECONDS)
    except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
        return silent
    except ray.exceptions.RayError as error:
        raise TrainerError(
            f"the lead of {config.run} is gone for good: {error}; the same command continues the "
            "run"
        ) from error


def _lead_of(*given: Any, largest: int = _LARGEST) -> type[Lead]:
    """Return a lead's class with its arguments inside. Ray keeps classes in the cluster's head;
    large arguments stay with the caller, and its death would rule out a restart. Raises UserError
    for arguments above the limit.
    """
    packed = zlib.compress(cloudpickle.dumps(given))
    if len(packed) > largest:
        raise UserError(
            f"the tasks take {len(packed) / 1e6:.0f} MB, compressed, and a cluster stores at most "
            f"{largest / 1e6:.0f} MB of a run; make tasks smaller, and let graders read large "
            "data from shared files"
        )

    class RunLead(Lead):
        def __init__(self) -> None:
            # A deprecation inside Ray.
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
            super().__init__(*cloudpickle.loads(zlib.decompress(packed)), again=again)

    return RunLead


def _wanted(config: TrainConfig) -> dict[str, int]:
    """Return a lead's share of its machine; it includes a trainer of one machine."""
    return {
        "num_cpus": 1,
        "num_gpus": config.processes_here if config.nnodes == 1 and has_gpus(config) else 0,
    }


def _begin(
    config: TrainConfig,
    work: Callable[..., Any],
    arguments: Mapping[str, Any],
    console: Console,
    cluster: Cluster = RAY,
) -> tuple[Any, bool]:
    """Return (the run's actor, whether it was started now); joins an actor without a waiting
    program. Raises RunFolderError if the actor may not be joined, and the errors of `_lead_of`."""
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
            actor = actor_class(kind, cluster, **options).remote()
            actor.__ray_ready__.remote()  # ray:// reports a taken name only now
            return actor, True
        except ValueError:  # the name is taken
            try:
                other = cluster.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                time.sleep(_LOOK_SECONDS)
                continue
        is_done, why_not = _answer(
            config,
            other.looked_at.remote(config),
            (False, "it does not answer now"),
            cluster,
        )
        if is_done:
            _, words = _answer(config, other.done.remote(), (None, None), cluster)
            if words is not None:
                console.line(f"note: the run ended with no program waiting for it: {words[1]}")
            cluster.kill(other)  # done, result not fetched
            time.sleep(_LOOK_SECONDS)
        elif why_not is None:
            return other, False
        else:
            raise RunFolderError(
                f"{config.run} is already active on this cluster, in actor {name!r}, and "
                f"{why_not}; to end it: ray kill-actor --name {name!r} --namespace {NAMESPACE} "
                "--force --no-restart"
            )
    raise RunFolderError(
        f"the name {name!r} of a finished actor is still taken; try again, or restart the cluster"
    )

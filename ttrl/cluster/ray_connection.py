"""Connect to a Ray cluster, start its actors and transfer their errors."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import ray

from ttrl import errors
from ttrl.configs.run import TrainConfig
from ttrl.errors import TtrlError, UserError

NAMESPACE = "ttrl"
ASK_SECONDS = 30.0
"""Timeout of an actor's answer; Ray needs about as long to detect a dead machine."""
START_SECONDS = 300.0
"""Timeout of an actor's start: imports take minutes on a busy machine or a slow disk."""
_begun: list[Any] = []
Words = tuple[str, str]
"""An error's class and message: some of our exceptions cannot be pickled, and their causes may be
missing on the other side.
"""


class Cluster(Protocol):
    """Name the calls a lead makes of Ray; the module `ray` has them."""

    def init(self, *, address: str, namespace: str, logging_level: int) -> Any:
        """Connect this process."""

    def is_initialized(self) -> bool:
        """Return whether this process is connected."""

    def remote(self, kind: type) -> Any:
        """Return a class of actors."""

    def get_actor(self, name: str, namespace: str) -> Any:
        """Return a named actor. Raises ValueError without one."""

    def kill(self, actor: Any) -> None:
        """End an actor."""

    def put(self, value: Any) -> Any:
        """Store a value; return a reference."""

    def get(self, reference: Any, *, timeout: float | None = None) -> Any:
        """Return the value, or raise the error, behind a reference."""

    def wait(
        self, references: list[Any], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return the references with and without a value."""

    def nodes(self) -> list[dict[str, Any]]:
        """Describe the machines."""


RAY: Cluster = ray


def connect(address: str, cluster: Cluster = RAY) -> None:
    """Connect this process to the cluster at `address` ("auto", "HOST:PORT", "ray://HOST:PORT").
    Harmless if connected. Raises UserError on failure."""
    if cluster.is_initialized():
        return
    try:
        cluster.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(
            f"the Ray cluster at {address!r} cannot be used: {error}\nStart one with `ray start "
            "--head` and `ray start --address=HOST:6379`. Make a token with `ray get-auth-token "
            "--generate`, and put it into ~/.ray/auth_token on each machine, including this one, "
            "or into RAY_AUTH_TOKEN"
        ) from error


def actor_class(kind: type, cluster: Cluster = RAY, **options: Any) -> Any:
    """Return a class of actors with two changes. They see only their requested GPUs (Ray shows all
    to an actor without any). Guards end their child processes (`ttrl.system.process_guard`): Ray
    would kill the guards, as an actor's own children, and leave the guarded processes, such as a
    vLLM engine with all of its memory.
    """
    variables = {
        "RAY_kill_child_processes_on_worker_exit": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    }
    return cluster.remote(kind).options(runtime_env={"env_vars": variables}, **options)


def begin_actor(kind: type, options: Mapping[str, Any], *arguments: Any) -> Any:
    """Start an actor. It ends with this process, or earlier by `end_actors`."""
    _begun.append(actor_class(kind, **options).remote(*arguments))
    return _begun[-1]


def end_actors() -> None:
    """End all actors of this process."""
    while _begun:
        ray.kill(_begun.pop())


def has_gpus(config: TrainConfig) -> bool:
    """Return whether the run takes GPUs of the cluster."""
    return config.device == "cuda" or (
        config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )


def last_line(error: BaseException) -> str:
    """Return the last line of a Ray error: for a failed actor start, the cause."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")


def as_words(error: BaseException) -> Words:
    """Convert an error for another machine."""
    known = isinstance(error, TtrlError)
    return type(error).__name__ if known else "TrainerError", str(
        error
    ) if known else f"{type(error).__name__}: {error}"


def from_words(words: Words) -> TtrlError:
    """Rebuild an error from `as_words`; UserError for classes with more than a message."""
    kind: Any = getattr(errors, words[0])
    try:
        error: TtrlError = kind(words[1])
    except TypeError:
        return UserError(words[1])
    return error

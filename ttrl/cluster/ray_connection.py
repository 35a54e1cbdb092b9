"""To a Ray cluster and back: how it is reached, and how its actors say what went wrong."""

import logging
from collections.abc import Mapping
from typing import Any

import ray

from ttrl import errors
from ttrl.configs.run import TrainConfig
from ttrl.errors import TtrlError, UserError

NAMESPACE = "ttrl"
ASK_SECONDS = 30.0
"""For an actor's answer; Ray itself finds a dead machine in about as many."""
START_SECONDS = 300.0
"""For an actor to be there at all: imports take minutes on a machine with much to do, or from a
slow disk.
"""
_begun: list[Any] = []
Words = tuple[str, str]
"""An error's class and message: some of our exceptions cannot be pickled, and their causes need not
be there on both sides.
"""


def connect(address: str) -> None:
    """Connect this process to the cluster at `address` ("auto", "HOST:PORT", "ray://HOST:PORT").
    Harmless where it is. Raises UserError where that fails."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(
            f"the Ray cluster at {address!r} cannot be used: {error}\nStart one with `ray start "
            "--head` and `ray start "
            "--address=HOST:6379`; its token (`ray get-auth-token --generate`) has to be in "
            "~/.ray/auth_token on each machine, "
            "this one too, or in RAY_AUTH_TOKEN"
        ) from error


def actor_class(kind: type, **options: Any) -> Any:
    """Return a class of actors that see only GPUs that they ask for (Ray shows all to one that asks
    for none), and whose child processes are ended by their guards (`ttrl.system.process_guard`).
    Ray would kill the guards, as they are an actor's own children, and leave what they guard, such
    as an engine of vLLM with all of its memory.
    """
    variables = {
        "RAY_kill_child_processes_on_worker_exit": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    }
    return ray.remote(kind).options(runtime_env={"env_vars": variables}, **options)


def begin_actor(kind: type, options: Mapping[str, Any], *arguments: Any) -> Any:
    """Start an actor, which ends with this process, or before with `end_actors`."""
    _begun.append(actor_class(kind, **options).remote(*arguments))
    return _begun[-1]


def end_actors() -> None:
    """End all actors that this process began."""
    while _begun:
        ray.kill(_begun.pop())


def has_gpus(config: TrainConfig) -> bool:
    """Return whether the run takes GPUs of the cluster."""
    return config.device == "cuda" or (
        config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )


def last_line(error: BaseException) -> str:
    """Return what an error of Ray ends with: where an actor's beginning failed, the cause."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")


def as_words(error: BaseException) -> Words:
    """Return what an error says, for another machine."""
    known = isinstance(error, TtrlError)
    return type(error).__name__ if known else "TrainerError", str(
        error
    ) if known else f"{type(error).__name__}: {error}"


def from_words(words: Words) -> TtrlError:
    """Return the error that `as_words` was given; UserError for those that are made of more than a
    message.
    """
    kind: Any = getattr(errors, words[0])
    try:
        error: TtrlError = kind(words[1])
    except TypeError:
        return UserError(words[1])
    return error

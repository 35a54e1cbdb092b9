"""Define every exception ttrl raises on purpose, in one tree.

TtrlError
├── UserError (ValueError)      something given is wrong; the message says how to put it right
│   ├── ConfigError             a config: unknown keys, wrong types, conflicts, all at once
│   ├── TaskError               a task: no messages, a grader that cannot be called
│   ├── ModelFolderError        a model folder: missing, incomplete, of an unsupported family
│   ├── TokenizationError       inexact tokens of a sample
│   │   └── TemplateRefusalError  a chat template raised an error for these messages
│   ├── UnmovedStepError        an optimizer step moved nothing and leaves nothing to study
│   ├── PackError               packed tensors: against their contract, or unreadable
│   └── RunFolderError          a run folder: of another config, damaged, owned elsewhere
│       └── RunFolderInUseError   another process has it, and lives
├── GraderError                 a grader raised, returned no number, or took too long
├── RolloutError                a task's rollout raised, hung, or never asked the model
│   └── RolloutLimitError       no turns or tokens are left, or the context is full
├── ServerError (RuntimeError)  an inference server
│   ├── RequestError            one request failed; says how, and whether another try may help
│   ├── ServerStartError        it never became healthy; the message ends with its last log lines
│   ├── ServerDiedError         it was healthy once and is gone
│   └── WeightSyncError         it does not compute with its given weights
├── TrainerError (RuntimeError) a recipe process failed; the message ends with its last log lines
│   └── TrainerDiedError        it was killed, here or elsewhere; another start may help
├── TrainerMemoryError (MemoryError)  training does not fit; names memory savings
├── DriftError (ArithmeticError)     sampler and trainer compute different policies; names causes
├── DivergedError (ArithmeticError)  losses or gradients stay non-finite although steps are skipped
└── StorageError (OSError)      a file could not be written (disk full, no permission)
"""

import os
import traceback
from typing import Any, Literal

from ttrl.text import counted, harmless

RequestFailure = Literal["connection", "timeout", "stall", "status", "malformed"]
RolloutLimit = Literal["turns", "tokens", "context", "seconds"]


class TtrlError(Exception):
    """Catch this root to catch everything ttrl raises on purpose."""

    def __str__(self) -> str:
        """Return the message, with quotes of servers, models and files made harmless to
        terminals."""
        return harmless(super().__str__())


class UserError(TtrlError, ValueError):
    """Report a mistake in something the user gave to ttrl."""


class ConfigError(UserError):
    """Report a wrong config; `problems` lists every mistake, one line each."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        listed = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{where}: {counted(len(problems), 'problem')}\n{listed}")


class TaskError(UserError):
    """Report a task ttrl cannot sample or grade."""


class ModelFolderError(UserError):
    """Report a model folder: missing, incomplete or of an unsupported family."""


class TokenizationError(UserError):
    """Report inexact tokens of a sample."""


class TemplateRefusalError(TokenizationError):
    """Report an error raised by the chat template; the message names the messages."""


class UnmovedStepError(UserError):
    """Report an optimizer step without effect. updates: how many steps its iteration has."""

    def __init__(self, message: str, updates: int = 1) -> None:
        super().__init__(message)
        self.updates = updates


class PackError(UserError):
    """Report packed tensors: unreadable or against their contract."""


class RunFolderError(UserError):
    """Report a run folder: locked, damaged or of another config."""


class RunFolderInUseError(RunFolderError):
    """Report a run folder in use by another living process."""


class GraderError(TtrlError):
    """Report a grader: it raised, returned no finite number, or took too long."""


class RolloutError(TtrlError):
    """Report a task's rollout: it raised, took too long, or never asked the model."""


class RolloutLimitError(RolloutError):
    """Refuse a rollout another request to the model.

    limit: "turns", "tokens" or "seconds" (the task's `RolloutLimits`; the last is `total_seconds`),
        "context" (the conversation leaves the model no room to answer).
    """

    def __init__(self, message: str, limit: RolloutLimit) -> None:
        super().__init__(message)
        self.limit = limit


class ServerError(TtrlError, RuntimeError):
    """An inference server failed."""


class RequestError(ServerError):
    """One request failed.

    kind: "connection" (refused or broken off), "timeout" (no answer in time), "stall" (a stream
        stopped in its middle), "status" (the server answered with an error), "malformed" (its
        answer cannot be read).
    status: the HTTP status; None without one.
    retry_after: the wait in seconds, as the server asks; None if it does not say.
    """

    def __init__(
        self,
        message: str,
        kind: RequestFailure,
        *,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after

    @property
    def worth_retry(self) -> bool:
        """Tell whether another try may help: not for statuses below 500 other than 408 and 429."""
        return (
            self.kind != "status"
            or self.status is None
            or self.status in (408, 429)
            or self.status >= 500
        )


class ServerStartError(ServerError):
    """A server never became healthy."""


class ServerDiedError(ServerError):
    """Report the death of a healthy server."""


class WeightSyncError(ServerError):
    """Report a server without the given weights."""


class TrainerError(TtrlError, RuntimeError):
    """A recipe process failed."""


class TrainerDiedError(TrainerError):
    """Report a killed recipe process, or the loss of its processes on other machines."""


class TrainerMemoryError(TtrlError, MemoryError):
    """Training does not fit into memory."""


class DriftError(TtrlError, ArithmeticError):
    """Report different policies in sampler and trainer: how far apart, on which tokens, and the
    likely causes.
    """


class DivergedError(TtrlError, ArithmeticError):
    """Losses or gradients are not finite, too many times in a row or because the weights are not;
    nothing was saved.
    """


class StorageError(TtrlError, OSError):
    """Report an incomplete write; the earlier file is still there."""


def describe(error: BaseException) -> str:
    """Return `TypeName: message` on one line, made `harmless`, even if the exception's `__str__`
    fails.
    """
    text = harmless("".join(traceback.format_exception_only(error)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not isinstance(error, SyntaxError):
        line = lines[0]
    else:
        line = lines[-1]
    if len(line) <= 400:
        return line
    return line[:399] + "…"


def raised_in(error: BaseException) -> str:
    """Return the place of an exception in somebody's code, such as " (tasks.py, line 3)"; "" if it
    has none beyond its caller's.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [one for one in frames if not one.filename.startswith("<frozen")]
    if not frames:
        return ""
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"


def complaints(check: Any, where: str = "") -> list[str]:
    """Return the message of a check's UserError, after `where`; [] if the check passes."""
    try:
        check()
    except UserError as error:
        return [f"{where}{error}"]
    return []

"""Every exception that ttrl raises on purpose, in one tree.

TtrlError
├── UserError (ValueError)      something given is wrong; the message says how to put it right
│   ├── ConfigError             a config: unknown keys, wrong types, conflicts, all at once
│   ├── TaskError               a task: no messages, a grader that cannot be called
│   ├── ModelFolderError        a model folder: missing, incomplete, of an unsupported family
│   ├── TokenizationError       tokens of a sample that are not known exactly
│   │   └── TemplateRefusalError  a chat template raised an error for these messages
│   ├── UnmovedStepError        an optimizer step that moved nothing, which leaves nothing to study
│   ├── PackError               packed tensors that break their contract, or cannot be read
│   └── RunFolderError          a run folder: of another config, damaged, owned elsewhere
│       └── RunFolderInUseError   another process has it, and lives
├── GraderError                 a grader raised, returned no number, or took too long
├── RolloutError                a task's rollout raised, hung, or never asked the model
│   └── RolloutLimitError       no turns or tokens are left, or the context is full
├── ServerError (RuntimeError)  an inference server
│   ├── RequestError            one request failed; says how, and whether another try may help
│   ├── ServerStartError        it never became healthy; the message ends with its last log lines
│   ├── ServerDiedError         it was healthy once and is gone
│   └── WeightSyncError         it does not compute with the weights that it was given
├── TrainerError (RuntimeError) a recipe process failed; the message ends with its last log lines
│   └── TrainerDiedError        it was killed, here or elsewhere; another start may help
├── TrainerMemoryError (MemoryError)  training does not fit; says what would save memory
├── DriftError (ArithmeticError)     sampler and trainer compute different policies; names causes
├── DivergedError (ArithmeticError)  losses or gradients stay non-finite although steps are skipped
└── StorageError (OSError)      a file could not be written (disk full, no permission)
"""

import traceback
from typing import Any, Literal

from ttrl.text import harmless

RequestFailure = Literal["connection", "timeout", "stall", "status", "malformed"]
RolloutLimit = Literal["turns", "tokens", "context", "seconds"]


class TtrlError(Exception):
    """The root: catch this to catch everything that ttrl raises on purpose."""

    def __str__(self) -> str:
        """Return the message; what it quotes of a server, a model or a file acts on no terminal."""
        return harmless(super().__str__())


class UserError(TtrlError, ValueError):
    """Something that was given to ttrl is wrong."""


class ConfigError(UserError):
    """A config is wrong; `problems` lists everything that is, one line each."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        if len(problems) == 1:
            count = "1 problem"
        else:
            count = f"{len(problems)} problems"
        super().__init__(
            f"{where}: {count}\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


class TaskError(UserError):
    """A task cannot be sampled or graded as it is."""


class ModelFolderError(UserError):
    """A model folder is missing, incomplete or of an unsupported family."""


class TokenizationError(UserError):
    """The tokens of a sample are not known exactly."""


class TemplateRefusalError(TokenizationError):
    """The chat template raised an error for these messages; the message says which."""


class UnmovedStepError(UserError):
    """An optimizer step moved nothing. updates: how many steps its iteration has."""

    def __init__(self, message: str, updates: int = 1) -> None:
        super().__init__(message)
        self.updates = updates


class PackError(UserError):
    """Packed tensors break their contract or cannot be read."""


class RunFolderError(UserError):
    """A run folder is locked, belongs to another config, or is damaged."""


class RunFolderInUseError(RunFolderError):
    """Another process has a run folder, and lives."""


class GraderError(TtrlError):
    """A grader raised, returned something that is not a finite number, or took too long."""


class RolloutError(TtrlError):
    """A task's rollout raised, took too long, or never asked the model."""


class RolloutLimitError(RolloutError):
    """A rollout may not ask the model again.

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
        that stopped in its middle), "status" (the server answered with an error), "malformed" (its
        answer cannot be read).
    status: the HTTP status; None where there was none.
    retry_after: seconds that the server asks us to wait; None where it does not say.
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
    """A server that was healthy is gone."""


class WeightSyncError(ServerError):
    """A server does not compute with the weights that it was given."""


class TrainerError(TtrlError, RuntimeError):
    """A recipe process failed."""


class TrainerDiedError(TrainerError):
    """A recipe process was killed, or lost the processes on other machines that it trained with."""


class TrainerMemoryError(TtrlError, MemoryError):
    """Training does not fit into memory."""


class DriftError(TtrlError, ArithmeticError):
    """Sampler and trainer do not compute the same policy; says by how much, on which tokens, and
    what the likely causes are.
    """


class DivergedError(TtrlError, ArithmeticError):
    """Losses or gradients are not finite, too many times in a row or because the weights are not;
    nothing was saved.
    """


class StorageError(TtrlError, OSError):
    """A file could not be written completely; what stood there before still does."""


def describe(error: BaseException) -> str:
    """Return `TypeName: message` on one line, made `harmless`, also for exceptions whose `__str__`
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


def complaints(check: Any, where: str = "") -> list[str]:
    """Return what a check has to say, after `where`, where it raises a UserError; [] where it does
    not.
    """
    try:
        check()
    except UserError as error:
        return [f"{where}{error}"]
    return []

"""Track changes in a run's config since its start: show them, refuse forbidden ones, record the
rest.

Settings are compared one by one, including those inside `training`, `server` and `sampling`, under
names such as `training.lr`. config_history.jsonl has a line for each start with changes: the time,
the first affected iteration, and each setting's value before and after.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ttrl.configs.base import Settings, without_secrets
from ttrl.errors import RunFolderError
from ttrl.facts import ConfigChange, read_facts
from ttrl.system.files import append_jsonl, read_jsonl

ALLOW_VARIABLE = "TTRL_ALLOW_CHANGES"
HISTORY_FILE = "config_history.jsonl"
ALL = "all"

# Free to change on resume; any other change would make it another run. (seq_len and share decide
# the place of samples, not their weight, and a row too short for them must not end a run.)
MAY_CHANGE = {
    "run", "iterations", "stop_at", "validate_every", "keep_checkpoints", "keep_best",
    "requests_log", "sample_files", "keep_every", "save_every", "mirror", "cache", "seq_len",
    "too_long", "share", "placement", "weight_sync", "weight_check", "servers", "joined_servers",
    "adapters", "trainer", "trainer_memory", "trainer_restarts", "cluster", "join_timeout",
    "start_timeout", "training.collective_timeout", "training.sampler_rows", "loggers", "drift",
    "drift_limits", "server.gpu_memory_utilization", "server.max_num_seqs",
    "server.max_num_batched_tokens", "server.enable_nccl_comm_suspend",
    "training.activation_offloading", "sampling_workers", "rdzv_endpoint", "joined_key_file",
    "joined_run",  # the last three are gone
    "overfit",  # tasks.json guards the tasks themselves
}  # fmt: skip
# Brought along by another machine. It changes only the rounding of sums, so it is reported, not
# refused.
MAY_CHANGE_WITH_A_NOTE = {
    "num_threads": "rounding changes, so results are no longer the same bit for bit"
}
_NESTED = ("training", "server", "sampling")
_MISSING = "not set"


def flat(config: Settings) -> Settings:
    """Return one value per setting; those of nested mappings under dotted names."""
    flattened: dict[str, object] = {}
    for key, value in config.items():
        if key in _NESTED and isinstance(value, Mapping):
            flattened |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            flattened[key] = value
    return flattened


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (before, now) of each changed setting, by name; `_MISSING` for an absent one."""
    old = flat(before)
    new = flat(now)
    names = sorted(old.keys() | new.keys())
    pairs = {name: (old.get(name, _MISSING), new.get(name, _MISSING)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def as_diff(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return two lines per setting, as in a patch."""
    lines = []
    for name, pair in changed.items():
        lines += [
            f"  {sign} {name}: {_shown(without_secrets(value, name))}"
            for sign, value in zip("-+", pair, strict=True)
        ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value == _MISSING:
        return f"({_MISSING})"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000).strip()
    return text.removesuffix("...").strip()


def allowed_names(allow: Sequence[str]) -> list[str]:
    """Return the names allowed by the caller and the environment: TTRL_ALLOW_CHANGES=lr,seed for
    scripts without an option.
    """
    words = os.environ.get(ALLOW_VARIABLE, "").replace(",", " ").split()
    return [*allow, *words]


def check_changes(
    changed: Mapping[str, tuple[Any, Any]], allow: Sequence[str], where: Path
) -> list[str]:
    """Return notes on changes allowed in any case. `allow`: names such as "training.lr", an
    unambiguous "lr", or "all". Raises RunFolderError with the difference if a change is not
    allowed.
    """
    free = MAY_CHANGE | MAY_CHANGE_WITH_A_NOTE.keys()
    refused = {
        name: pair
        for name, pair in changed.items()
        if name not in free and not _is_allowed(name, allow)
    }
    if refused:
        names = ",".join(refused)
        raise RunFolderError(
            f"{where} was started with another config:\n{as_diff(refused)}\nRestore the settings, "
            "or choose another run folder. To continue with the new settings, use train(..., "
            f"allow_changes={sorted(refused)}), or start the command with {ALLOW_VARIABLE}={names} "
            "(or =all)"
        )
    return [
        f"{name} was {_shown(changed[name][0])} and is {_shown(changed[name][1])} now: {note}"
        for name, note in MAY_CHANGE_WITH_A_NOTE.items()
        if name in changed
    ]


def _is_allowed(name: str, allow: Sequence[str]) -> bool:
    return any(word in (ALL, name, name.split(".")[0], name.split(".")[-1]) for word in allow)


def remember_changes(run: Path, changed: Mapping[str, tuple[Any, Any]], iteration: int) -> None:
    """Append to config_history.jsonl, unless the last line says the same, from a start killed right
    afterwards.
    """
    told = {name: list(pair) for name, pair in changed.items() if name != "run"}
    if not told:
        return
    past = history(run)
    if past and (past[-1].iteration, past[-1].changes) == (iteration, told):
        return
    change = ConfigChange(iteration=iteration, time=time.time(), changes=told)
    append_jsonl(run / HISTORY_FILE, change.to_json())


def history(run: Path) -> list[ConfigChange]:
    """Read config_history.jsonl; a line without an object says nothing. Raises RunFolderError."""
    try:
        lines = read_jsonl(run / HISTORY_FILE)
    except ValueError as error:
        raise RunFolderError(f"{error}; move the file away: only reports read it") from error
    return [read_facts(ConfigChange, line) for line in lines if isinstance(line, dict)]

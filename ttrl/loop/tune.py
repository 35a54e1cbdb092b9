"""Runs a recipe through `tune run` in a process of its own, and fails loudly when it fails."""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm.auto import tqdm

from ttrl.errors import ConfigError, StorageError, TrainerError
from ttrl.files import write_text
from ttrl.processes import ChildProcess

GRPO_RECIPE = "ttrl/grpo_recipe"
SFT_RECIPE = "ttrl/sft_recipe"
_PROGRESS_VARIABLE = "TTRL_PROGRESS_FILE"
_POLL_SECONDS = 0.02
_ERRORS = ("ConfigError", "ModelFolderError", "PackError", "RunFolderError", "StorageError", "TokenizationError")


def tune(
    config: Mapping[str, Any],
    config_path: str | os.PathLike[str],
    *,
    recipe: str = GRPO_RECIPE,
    nproc_per_node: int = 1,
    torchrun_args: Sequence[str] = (),
    log_path: str | os.PathLike[str] | None = None,
    pbar: bool = True,
    pbar_desc: str = "training",
) -> Path:
    """Writes the recipe's config to `config_path`, runs `tune run [torchrun arguments] RECIPE --config FILE` and returns the new
    checkpoint's folder, `output_dir`/checkpoint.

    `config` is written as it is; paths in it are best absolute. With `nproc_per_node` above 1, or with `torchrun_args` (such as
    ["--nnodes", "2", "--rdzv-endpoint", "HOST:PORT"]), torchrun starts the processes. The log is `output_dir`/train.log unless
    named.

    Raises TrainerError, ending with the last lines of the log, when a process fails or leaves no checkpoint; StorageError where
    the recipe said that the disk is full.
    """
    if "output_dir" not in config:
        raise ConfigError(str(config_path), ["output_dir is missing"])
    output = Path(config["output_dir"])
    try:
        text = yaml.safe_dump(dict(config), sort_keys=False)
    except yaml.YAMLError as error:
        raise ConfigError(str(config_path), [f"{error.args[-1]!r} cannot be written to it; use plain values"]) from error
    write_text(config_path, text)
    torchrun = [*(["--nproc_per_node", str(nproc_per_node)] if nproc_per_node > 1 else []), *torchrun_args]
    run_recipe(
        ["run", *torchrun, recipe, "--config", str(config_path)],
        Path(log_path or output / "train.log"),
        pbar=pbar,
        pbar_desc=pbar_desc,
    )
    checkpoint = output / "checkpoint"
    if not (checkpoint / "config.json").is_file():
        raise TrainerError(f"the recipe ended without an error but left no checkpoint in {checkpoint}; see {log_path or output}")
    return checkpoint


def run_recipe(tune_arguments: Sequence[str], log_path: Path, *, pbar: bool, pbar_desc: str) -> None:
    """`tune ARGUMENTS` in a process of its own, which does not outlive ours. Raises as `tune`."""
    command = [sys.executable, "-m", "torchtune._cli.tune", *tune_arguments]
    with tempfile.TemporaryDirectory(prefix="ttrl-") as temporary:
        progress = Path(temporary, "progress")
        wait_for_process(command, log_path, progress=progress, pbar=pbar, pbar_desc=pbar_desc)


def wait_for_process(command: Sequence[str], log_path: Path, *, progress: Path, pbar: bool, pbar_desc: str) -> None:
    """Runs a trainer's command to its end, with a bar that follows the microbatches. Raises TrainerError or StorageError."""
    # Threads that wait by spinning make training many times slower wherever another program wants a core (measured: 14 times).
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ) | {_PROGRESS_VARIABLE: str(progress)}
    shown = pbar and sys.stderr.isatty()
    with (
        ChildProcess(command, log_path, env=environment) as child,
        tqdm(desc=pbar_desc, bar_format="{desc}: {elapsed}", leave=False, disable=not shown) as bar,
    ):
        while (returncode := child.poll()) is None:
            _follow(progress, bar)
            time.sleep(_POLL_SECONDS)
        if returncode == 0:
            return
        tail = child.log_tail(200)  # torchrun adds a page of its own to what a rank said
    said = next((line for line in reversed(tail.splitlines()) if any(f"{name}: " in line for name in _ERRORS)), None)
    if said is not None and "StorageError: " in said:
        raise StorageError(said[said.index("StorageError: ") + len("StorageError: ") :])
    last_lines = "\n".join(tail.splitlines()[-30:])
    ending = f"exit code {returncode}" if returncode > 0 else f"killed by signal {-returncode}"
    if returncode == -9:
        ending += ", perhaps for want of memory"
    raise TrainerError(f"the trainer failed ({ending}): {' '.join(command)}\nThe end of its log, {log_path}:\n{last_lines}")


def _follow(progress: Path, bar: "tqdm[Any]") -> None:
    """Shows the time until the recipe says how much there is to do, then a bar."""
    if bar.disable:
        return
    try:
        done, total = map(int, progress.read_text().split())
    except (OSError, ValueError):  # not there yet, or just being written
        if time.time() - bar.last_print_t > 0.5:
            bar.last_print_t = time.time()
            bar.refresh()
        return
    if bar.total != total:
        bar.total, bar.bar_format = total, "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
    if bar.n != done:
        bar.n = done
        bar.refresh()

"""Run a recipe through `tune run` in a process of its own, and report its failures."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from ttrl.configs.recipe import PROGRESS_VARIABLE, STORE_VARIABLE
from ttrl.errors import ConfigError, StorageError, TrainerDiedError, TrainerError
from ttrl.server.cpu import SHORT_WAITS
from ttrl.system.files import compile_cache, full_disk, size_of, write_text
from ttrl.system.processes import LOOPBACK, ChildProcess, log_tail

GRPO_RECIPE = "ttrl/grpo_recipe"
SFT_RECIPE = "ttrl/sft_recipe"
_POLL_SECONDS = 0.02
_ERRORS = (
    "ConfigError",
    "DivergedError",
    "ModelFolderError",
    "PackError",
    "RunFolderError",
    "StorageError",
    "TokenizationError",
    "TrainerMemoryError",
)
"""Errors a trainer reports itself before it ends; another start would repeat them."""


def tune(
    config: Mapping[str, Any],
    config_path: str | os.PathLike[str],
    *,
    recipe: str = GRPO_RECIPE,
    nproc_per_node: int = 1,
    torchrun_args: Sequence[str] = (),
    log_path: str | os.PathLike[str] | None = None,
    variables: Mapping[str, str] | None = None,
    pbar: bool = True,
    pbar_desc: str = "training",
    process: "Callable[..., TrainerProcess] | None" = None,
) -> Path:
    """Write the recipe's config to `config_path`, run `tune run [torchrun arguments] RECIPE
    --config FILE`, and return the new checkpoint's folder, `output_dir`/checkpoint.

    `config` is written unchanged; prefer absolute paths in it. With `nproc_per_node` above 1, or
    with `torchrun_args` (such as ["--nnodes", "2", "--rdzv-endpoint", "HOST:PORT"]), torchrun
    starts the processes. The log is `output_dir`/train.log unless named. variables: further
    environment variables. process: starts the command; default TrainerProcess.

    Raises TrainerError, ending with the last lines of the log, if a process fails or leaves no
    checkpoint; StorageError if the recipe reported a full disk.

        checkpoint = tune(
            {"model": "models/tiny", "packed": "packed.safetensors", "output_dir": "out"},
            "recipe.yaml",
        )
    """
    write_recipe_config(config, config_path)
    output = Path(config["output_dir"])
    log = Path(log_path or output / "train.log")
    with tempfile.TemporaryDirectory(prefix="ttrl-") as temporary:
        torchrun, private = meeting_here(Path(temporary), nproc_per_node, torchrun_args)
        torchrun += torchrun_args
        command = tune_command(
            config_path, recipe=recipe, nproc_per_node=nproc_per_node, torchrun_args=torchrun
        )
        private |= variables or {}
        start = process or TrainerProcess
        with start(command, log, Path(temporary, "progress"), private) as running:
            running.show(running.ended, pbar=pbar, pbar_desc=pbar_desc)
    return checkpoint_of(output, log_path)


def write_recipe_config(config: Mapping[str, Any], path: str | os.PathLike[str]) -> str:
    """Write a recipe's config as YAML, and return the text. Raises ConfigError for values YAML
    cannot hold.
    """
    if "output_dir" not in config:
        raise ConfigError(str(path), ["output_dir is missing"])
    try:
        text = yaml.safe_dump(dict(config), sort_keys=False)
    except yaml.YAMLError as error:
        raise ConfigError(
            str(path), [f"{error.args[-1]!r} cannot be written to it; use plain values"]
        ) from error
    write_text(path, text, durable=False)  # rewritten for each process
    return text


def tune_command(
    config_path: str | os.PathLike[str],
    *,
    recipe: str = GRPO_RECIPE,
    nproc_per_node: int = 1,
    torchrun_args: Sequence[str] = (),
) -> list[str]:
    """Return `tune run …`, with this Python. For several processes, or with arguments for it,
    torchrun starts them.
    """
    torchrun = [
        *(["--nproc_per_node", str(nproc_per_node)] if nproc_per_node > 1 else []),
        *torchrun_args,
    ]
    return [
        sys.executable,
        "-m",
        "torchtune._cli.tune",
        "run",
        *torchrun,
        recipe,
        "--config",
        str(config_path),
    ]


def meeting_here(
    folder: Path, processes: int, torchrun_args: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return torchrun arguments and environment variables for several processes of this machine to
    meet in files of `folder`, private to this user. Neither if `torchrun_args` name another meeting
    point.

    By default torchrun listens on all interfaces, asks for no password, and unpickles any message,
    which runs its code.
    """
    named = ("--rdzv", "--nnodes", "--master", "--standalone")
    if processes == 1 or any(
        argument.replace("_", "-").startswith(named) for argument in torchrun_args
    ):
        return [], {}
    arguments = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-conf",
        "store_type=file",
        "--rdzv-endpoint",
        str(folder / "torchrun"),
        "--rdzv-id",
        folder.name,
        "--local-addr",
        "127.0.0.1",
    ]
    # The processes have a store in a file, so the agent opens none; gloo and NCCL connect them over
    # the loopback only.
    variables = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        STORE_VARIABLE: str(folder / "processes"),
    }
    return arguments, variables | {
        name: value for name, value in LOOPBACK.items() if name not in os.environ
    }


def checkpoint_of(output: Path, log_path: str | os.PathLike[str] | None = None) -> Path:
    """Return a recipe's checkpoint. Raises TrainerError without one."""
    checkpoint = output / "checkpoint"
    if not (checkpoint / "config.json").is_file():
        raise TrainerError(
            f"the recipe ended without an error, but {checkpoint} holds no checkpoint; see "
            f"{log_path or output}"
        )
    return checkpoint


class TrainerProcess(ChildProcess):
    """Run a trainer, or its torchrun, from start to end. It does not outlive ours.

        with TrainerProcess(command, log_path, progress) as process:
            process.show(process.ended, pbar=True, pbar_desc="training")

    progress: the trainer's progress file. variables: further environment variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        progress: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        # oneDNN keeps compiled products of 1024 shapes, a third of a megabyte each; row lengths
        # keep changing. With 256 a resident trainer of the tiny model holds 690 to 840 MiB over 40
        # iterations of ever new lengths, and no more at the end.
        defaults = (
            SHORT_WAITS
            | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
            | compile_cache(progress.parent)
        )
        environment = (
            defaults | dict(os.environ) | {PROGRESS_VARIABLE: str(progress)} | dict(variables or {})
        )
        super().__init__(command, log_path, env=environment)
        self.progress = progress
        self._task_log: tuple[Path, int, int] | None = None

    def stop(self, timeout: float = 1.0) -> int | None:
        """End it with all of its descendants, by force after a second: at any time its files are
        complete or absent.
        """
        return super().stop(timeout)

    def log_task_to(self, path: Path | None) -> None:
        """Set the log for quoting its errors: from now on its work on the task is logged at the end
        of `path`, the rest in its own log as before (None: everything).
        """
        self._task_log = None
        if path is not None:
            self._task_log = (path, size_of(path), size_of(self.log_path))

    def ended(self) -> bool:
        """Return False while it runs, True after a good end. Raises TrainerError or StorageError
        after a failure.
        """
        returncode = self.poll()
        if returncode is None:
            return False
        if returncode == 0:
            return True
        path = self.log_path
        before = ""
        tail = self.log_tail(200)  # torchrun adds a page of its own to a rank's message
        if self._task_log is not None:
            log, start, own_start = self._task_log
            of_task = log_tail(log, start, 200)
            if of_task:
                own = log_tail(path, own_start, 30)
                if own:
                    before = f"\nThe end of {path}:\n{own}"
                path = log
                tail = of_task
        said = next(
            (
                line
                for line in reversed(tail.splitlines())
                if any(f"{name}: " in line for name in _ERRORS)
            ),
            None,
        )
        if said is not None and "StorageError: " in said:
            raise StorageError(said[said.index("StorageError: ") + len("StorageError: ") :])
        full = full_disk(self.log_path)
        if full is not None:
            raise full  # it could not even report it: its log is on the same disk
        last_lines = "\n".join(tail.splitlines()[-30:])
        if returncode > 0:
            ending = f"exit code {returncode}"
        else:
            ending = f"killed by signal {-returncode}"
        if returncode == -9:
            ending += ", perhaps out of memory"
        # Torchrun's report on one of its processes; with several machines it may not know why
        # another one's are gone.
        killed = returncode < 0 or re.search(r"Signal \d+ \(SIG", self.log_tail(200)) is not None
        kind = (
            TrainerDiedError
            if said is None and (killed or "--nnodes" in self.command)
            else TrainerError
        )
        raise kind(
            f"the trainer failed ({ending}): {' '.join(self.command)}{before}\nThe end of its "
            f"log, {path}:\n{last_lines}"
        )

    def show(self, done: Callable[[], bool], *, pbar: bool, pbar_desc: str) -> None:
        """Wait until `done`, showing a bar of the microbatches."""
        shown = pbar and sys.stderr.isatty()
        with tqdm(
            desc=pbar_desc, bar_format="{desc}: {elapsed}", leave=False, disable=not shown
        ) as bar:
            while not done():
                follow_progress(self.progress, bar)
                time.sleep(_POLL_SECONDS)


def follow_progress(progress: Path, bar: "tqdm[Any]") -> None:
    """Show the elapsed time until the recipe reports its total, then a bar."""
    if bar.disable:
        return
    try:
        done, total = map(int, progress.read_text().split())
    except (OSError, ValueError):  # missing, or half-written
        if time.time() - bar.last_print_t > 0.5:
            bar.last_print_t = time.time()
            bar.refresh()
        return
    if bar.total != total:
        bar.total = total
        bar.bar_format = (
            "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
        )
    if bar.n != done:
        bar.n = done
        bar.refresh()

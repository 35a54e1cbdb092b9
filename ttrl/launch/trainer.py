"""Run the run's trainer, `tune run ttrl/grpo_recipe`: started once for all iterations, or once per
iteration.

A resident trainer follows a folder below the run's trainer/, one for each start
(`ttrl.system.request_folder`). A request is the recipe config of the one-shot form; an answer says
its files are complete. Its output goes to logs/trainer.log while it waits, and to the iteration's
own train.log while it trains. Any failure ends it, with the one-shot form's message.
"""

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ttrl.configs.machines import divided_devices
from ttrl.configs.run import TrainConfig
from ttrl.errors import TrainerDiedError, TrainerError, TtrlError
from ttrl.facts import SamplerTrainer, parse
from ttrl.launch.nodes import PROGRESS_FILE
from ttrl.launch.tune import (
    TrainerProcess,
    checkpoint_of,
    meeting_here,
    tune,
    tune_command,
    write_recipe_config,
)
from ttrl.records import Handover
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console
from ttrl.system.gpus import visible_devices
from ttrl.system.request_folder import LOOK_SECONDS, RequestFolder

# Fixed when a process starts; any other setting may differ between requests.
PROCESS_SETTINGS = ("device", "num_threads", "tensor_parallel", "cpu_offload")


class Trainer:
    """Train iterations, one at a time, in a process that does not outlive ours.

        trainer = Trainer(config, folder, console)
        trainer.start(recipe_config)                        # returns at once: imports and loading
                                                            run in the background
        checkpoint = trainer.make_checkpoint(1, recipe_config)
        trainer.stop()

    With `config.trainer` "once", `start` does nothing and each training has a process of its own:
    the same files, bit for bit. With `config.nnodes` above 1 it runs on machines of a cluster
    (`elsewhere`). Use an object in one thread at a time.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        console: Console,
        elsewhere: Callable[..., TrainerProcess] | None = None,
        process: Callable[..., TrainerProcess] = TrainerProcess,
    ) -> None:
        """elsewhere: starts it on other machines, given the config, the folder of this start, log
        and variables. process: starts a command on this machine.
        """
        self._config = config
        self._folder = folder
        self._console = console
        self._elsewhere = elsewhere
        self._process = process
        self._log = folder.path / "logs" / "trainer.log"
        self._resident: tuple[TrainerProcess, RequestFolder] | None = None
        self._private: tempfile.TemporaryDirectory[str] | None = None
        """Meeting place of its processes."""
        self._asked = 0
        self._made_of: dict[str, object] = {}
        self._handed_over: tuple[int, Handover] | None = None
        self._is_writing = False
        self._holding: int | None = None

    def start(self, recipe_config: Mapping[str, Any]) -> None:
        """Start the resident process; it loads the model of `recipe_config` (its pack is not needed
        yet) and waits. Returns at once. Harmless if it runs already."""
        if self._config.trainer == "resident" and self._resident is None:
            self._resident = self._start(recipe_config)

    def _start(self, recipe_config: Mapping[str, Any]) -> tuple[TrainerProcess, RequestFolder]:
        sessions = self._folder.path / "trainer"
        # Of earlier runs: their followers end.
        shutil.rmtree(sessions, ignore_errors=True)
        path = sessions / secrets.token_hex(4)
        path.mkdir(parents=True)
        config = dict(recipe_config) | {"follow": str(path), "packed": ""}
        write_recipe_config(config, path / "start.yaml")
        self._asked, self._made_of = 0, {name: config.get(name) for name in PROCESS_SETTINGS}
        variables = self._variables()
        if self._elsewhere is not None:
            return self._elsewhere(self._config, path, self._log, variables).start(), RequestFolder(
                path
            )
        self._leave_meeting()
        self._private = tempfile.TemporaryDirectory(prefix="ttrl-")
        assert self._config.nnodes == 1  # checked with the config
        torchrun, private = meeting_here(Path(self._private.name), self._config.processes_here)
        variables |= private
        command = tune_command(
            path / "start.yaml", nproc_per_node=self._config.processes_here, torchrun_args=torchrun
        )
        process = self._process(command, self._log, path / PROGRESS_FILE, variables).start()
        return process, RequestFolder(path)

    def _variables(self) -> dict[str, str]:
        """Return variables to keep the processes off the servers' GPUs, if the servers have their
        own. Never run on a GPU.
        """
        if self._config.placement != "split" or not self._config.servers_here:
            return {}
        trainers, _ = divided_devices(visible_devices(), self._config.processes_here)
        return {"CUDA_VISIBLE_DEVICES": ",".join(trainers)}

    def check(self) -> None:
        """Raise TrainerError, ending with the last lines of its log, if the resident process died
        while idle; the next `start` or `make_checkpoint` starts another. Does not wait.
        """
        if self._resident is not None:
            self._check_runs("while it was idle", self._log)

    def make_checkpoint(self, number: int, recipe_config: Mapping[str, Any]) -> Path:
        """Train iteration `number`, or, for 0 without a pack, make the canary of the existing
        checkpoint; return its folder.

        Files appear below `recipe_config["output_dir"]` as they are finished; the caller sets the
        train marker. Raises TrainerError, ending with the last lines of the log, if the trainer
        fails or dies; StorageError if the trainer reported a full disk. The next call starts
        another trainer.
        """
        output = Path(recipe_config["output_dir"])
        config_path = output / "grpo.yaml"
        pbar = not self._console.quiet
        pbar_desc = f"{number}: {'training' if number else 'canary'}"
        if self._config.trainer == "once":
            return tune(
                recipe_config,
                config_path,
                nproc_per_node=self._config.processes_here,
                variables=self._variables(),
                pbar=pbar,
                pbar_desc=pbar_desc,
                process=self._process,
            )
        self.check()
        if self._resident is not None and self._made_of != {
            name: recipe_config.get(name) for name in PROCESS_SETTINGS
        }:
            self.stop()
        self.start(recipe_config)
        assert self._resident is not None
        process, requests = self._resident
        log = output / "train.log"
        process.log_task_to(log)
        process.progress.unlink(missing_ok=True)
        text = write_recipe_config(recipe_config, config_path)
        self._asked += 1
        answer = requests.answer(self._asked)
        handover = requests.handover(self._asked)
        requests.put(requests.request(self._asked), text)

        def answered() -> bool:
            done = handover.exists() or answer.exists()
            if not done:
                self._check_runs("in the middle of an iteration", log, unless=answer)
            return done

        self._handed_over = None
        self._is_writing = False
        self._holding = None
        process.show(answered, pbar=pbar, pbar_desc=pbar_desc)
        if handover.exists():
            self._handed_over = number, parse(Handover, handover.read_bytes())
            self._is_writing = True
            if not recipe_config.get("save", True):
                self._holding = number
            return output / "checkpoint"
        process.log_task_to(None)
        return checkpoint_of(output)

    def wait_until_saved(self) -> bool:
        """Wait for the files of the last `make_checkpoint`, after an early return (see `handover`).
        Return False if the process was lost and its error already raised. Raises as
        `make_checkpoint`.
        """
        if not self._is_writing:
            return True
        if self._resident is None:
            return False
        process, requests = self._resident
        answer = requests.answer(self._asked)
        while not answer.exists():
            self._check_runs("while it wrote its files", self._log, unless=answer)
            time.sleep(LOOK_SECONDS)
        process.log_task_to(None)
        self._is_writing = False
        return True

    @property
    def holding(self) -> int | None:
        """Return the iteration whose weights and state only the process holds."""
        if self._resident is not None:
            return self._holding
        return None

    def handover(self, number: int) -> Handover | None:
        """Return where the process offers the weights of iteration `number`; None if it does not,
        or has died.
        """
        found = self._handed_over
        if self._resident is None or found is None or found[0] != number:
            return None
        return found[1]

    @property
    def compared(self) -> SamplerTrainer | None:
        """Return the last transfer's comparison of sampler and trainer, for train.jsonl."""
        if self._handed_over is None:
            return None
        return self._handed_over[1].compared

    def stop(self) -> None:
        """End the process at any point of its work. Harmless without one."""
        if self._resident is None:
            return
        process, requests = self._resident
        self._resident = None
        if requests.path.is_dir():
            with contextlib.suppress(OSError):  # on a full disk the missing folder ends them
                # For processes on other hosts, out of reach of signals.
                requests.put(requests.stop, "")
        process.stop()
        shutil.rmtree(requests.path.parent, ignore_errors=True)
        self._leave_meeting()

    def _leave_meeting(self) -> None:
        if self._private is not None:
            self._private.cleanup()
            self._private = None

    def _check_runs(self, when: str, log: Path, unless: Path | None = None) -> None:
        """Forget the resident process and raise TrainerError if it has ended: by a failure, or well
        but without the file `unless`."""
        assert self._resident is not None
        process, _ = self._resident
        try:
            if process.ended() and not (unless is not None and unless.exists()):
                raise TrainerError(f"the resident trainer ended by itself {when}; see {log}")
        except TtrlError as error:  # after Ctrl-C it still runs, and `stop` has to find it
            self._resident = None
            if (
                isinstance(error, TrainerDiedError)
                and self._config.nnodes > 1
                and "RendezvousTimeoutError" in str(error)
            ):
                # Another start would not help.
                raise TrainerError(
                    f"fewer than {self._config.nnodes} machines joined within "
                    f"{self._config.join_timeout} s (join_timeout); make sure that each can reach "
                    "the others at any port"
                ) from error
            raise

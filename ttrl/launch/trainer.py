"""The run's trainer: `tune run ttrl/grpo_recipe`, started once and asked for iteration after iteration, or started for each.

A resident trainer follows a folder below the run's trainer/, one for each start (`ttrl.system.request_folder`): a request is the
same recipe config that the one-shot form is started with, an answer says that its files are there. What it prints goes to
logs/trainer.log while it waits, and to the iteration's own train.log while it trains. Whatever goes wrong in it ends it, with the
message that the one-shot form ends with.
"""

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.errors import TrainerDiedError, TrainerError, TtrlError
from ttrl.launch.nodes import PROGRESS_FILE, arrived, is_loopback, network_environment, torchrun_arguments, write_meeting
from ttrl.launch.tune import TrainerProcess, checkpoint_of, recipe_arguments, tune_command, write_recipe_config
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console
from ttrl.system.request_folder import FolderWatch, RequestFolder

# What a process is made of when it starts; any other setting may differ from request to request.
PROCESS_SETTINGS = ("device", "num_threads", "tensor_parallel", "cpu_offload")


class Training:
    """An iteration that is being trained, while the caller does something else or waits."""

    def __init__(
        self,
        process: TrainerProcess,
        output: Path,
        is_done: Callable[[], bool],
        finish: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
        **bar: Any,
    ) -> None:
        self._process, self._output = process, output
        self._is_done, self._finish, self._sleep, self._bar = is_done, finish, sleep, bar
        self._checkpoint: Path | None = None

    def done(self) -> bool:
        """Whether the files are there. Does not wait. Raises TrainerError, ending with the last lines of the log, where the
        trainer failed or died; StorageError where it said that the disk is full."""
        if self._checkpoint is None and self._is_done():
            self._finish()
            self._checkpoint = checkpoint_of(self._output)
        return self._checkpoint is not None

    def result(self) -> Path:
        """Waits, with a progress bar; returns the checkpoint's folder. Raises as `done`."""
        if not self.done():
            self._process.show(self.done, sleep=self._sleep, **self._bar)
        assert self._checkpoint is not None
        return self._checkpoint


class Trainer:
    """Trains iterations, one at a time, in a process that does not outlive ours.

        trainer = Trainer(config, folder, console)
        trainer.start(recipe_config)                        # returns at once: imports and loading cost nobody time
        checkpoint = trainer.train(1, recipe_config)
        training = trainer.train_async(2, recipe_config)    # … sample meanwhile
        checkpoint = training.result()
        trainer.stop()

    With `config.trainer` "once", `start` does nothing and each training has a process of its own: the same files, bit for bit.
    With `config.nnodes` above 1, other machines join it (`ttrl.launch.nodes`). `torchrun_args`: further ones for torchrun.
    An object belongs to one thread at a time.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, console: Console, torchrun_args: Sequence[str] = ()) -> None:
        self._config, self._folder, self._console, self._torchrun = config, folder, console, list(torchrun_args)
        self._process: TrainerProcess | None = None
        self._training: Training | None = None
        # Of a resident process:
        self._requests: RequestFolder | None = None
        self._watch: FolderWatch | None = None
        self._asked = 0
        self._made_of: dict[str, Any] = {}

    def start(self, recipe_config: Mapping[str, Any]) -> None:
        """Starts the resident process, which loads what `recipe_config` names (of its pack nothing is needed yet) and waits.
        Returns at once. Harmless when it runs already."""
        if self._config.trainer != "resident" or self._process is not None:
            return
        sessions = self._folder.path / "trainer"
        shutil.rmtree(sessions, ignore_errors=True)  # of runs before: whoever still follows one of them ends
        path = sessions / secrets.token_hex(4)
        path.mkdir(parents=True)
        config = dict(recipe_config) | {"follow": str(path), "packed": ""}
        write_recipe_config(config, path / "start.yaml")
        self._requests, self._watch, self._asked = RequestFolder(path), FolderWatch(path), 0
        self._made_of = {name: config.get(name) for name in PROCESS_SETTINGS}
        torchrun, variables = self._torchrun, None
        if self._config.nnodes > 1:
            endpoint = self._config.endpoint()
            assert endpoint is not None  # checked with the config
            nnodes, timeout = self._config.nnodes, self._config.join_timeout
            torchrun = [*torchrun_arguments(nnodes, endpoint, path.name, leads=True, join_timeout=timeout), *torchrun]
            variables = network_environment(endpoint)
            write_meeting(path, self._config, self._config.nproc_per_node)
            self._console.line(
                f"the trainer waits at {endpoint} for {nnodes - 1} more of {nnodes} machines, {timeout} s at most; on each of "
                f"them: ttrl join {self._folder.path}"
            )
            if is_loopback(endpoint):
                self._console.line(f"note: {endpoint} is this machine's loopback; name an address that the others can reach")
        log = self._folder.path / "logs" / "trainer.log"
        self._process = self._started(path / "start.yaml", log, path / PROGRESS_FILE, torchrun, variables)

    def check(self) -> None:
        """Raises TrainerError, ending with the last lines of its log, where the resident process died, at work or while nobody
        asked it for anything; the next `start` or `train` starts another. Does not wait."""
        if self._training is not None:
            self._training.done()
        if self._process is None:
            return
        try:
            ended = self._has_ended(self._process)
        except TtrlError:
            self._forget()
            raise
        if ended:
            log = self._folder.path / "logs" / "trainer.log"
            self._forget()
            raise TrainerError(f"the resident trainer ended by itself, while nothing was asked of it; see {log}")

    def train(self, number: int, recipe_config: Mapping[str, Any]) -> Path:
        """Trains iteration `number`; returns its checkpoint's folder.

        Raises TrainerError, ending with the last lines of the log, when the trainer fails or dies, StorageError where it said
        that the disk is full. The next call starts another one.
        """
        return self.train_async(number, recipe_config).result()

    def train_async(self, number: int, recipe_config: Mapping[str, Any]) -> Training:
        """Begins to train iteration `number` and returns at once. One training at a time: take its `result` before the next.

        Files appear below `recipe_config["output_dir"]` as they are finished; its train marker is the caller's to set, after
        `result`. Raises TrainerError where the resident process has died since it was last asked.
        """
        assert self._training is None, "one training at a time"
        output = Path(recipe_config["output_dir"])
        bar = {"pbar": not self._console.quiet, "pbar_desc": f"{number}: training"}
        if self._config.trainer == "once":
            self._training = self._train_once(recipe_config, output, bar)
        else:
            self._training = self._ask(recipe_config, output, bar)
        return self._training

    def stop(self) -> None:
        """Ends the process, whatever it is doing. Harmless when there is none."""
        process, requests = self._process, self._requests
        self._forget()
        if requests is not None and requests.path.is_dir():
            with contextlib.suppress(OSError):  # on a full disk they end when the folder is gone
                requests.put(requests.stop, "")  # for processes on other hosts, which no signal reaches
        if process is not None:
            process.stop()
        if requests is not None:
            shutil.rmtree(requests.path.parent, ignore_errors=True)

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._process = self._requests = self._training = self._watch = None

    def _started(
        self,
        config_path: Path,
        log_path: Path,
        progress: Path,
        torchrun: Sequence[str],
        variables: Mapping[str, str] | None = None,
    ) -> TrainerProcess:
        arguments = recipe_arguments(config_path, nproc_per_node=self._config.nproc_per_node, torchrun_args=torchrun)
        return TrainerProcess(tune_command(arguments), log_path, progress, variables).start()

    def _train_once(self, recipe_config: Mapping[str, Any], output: Path, bar: dict[str, Any]) -> Training:
        write_recipe_config(recipe_config, output / "grpo.yaml")
        temporary = Path(tempfile.mkdtemp(prefix="ttrl-"))
        process = self._started(output / "grpo.yaml", output / "train.log", temporary / "progress", self._torchrun)
        self._process = process

        def over() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            self._forget()

        return Training(process, output, self._failing_as_over(process.ended, over), over, **bar)

    def _ask(self, recipe_config: Mapping[str, Any], output: Path, bar: dict[str, Any]) -> Training:
        self.check()
        if self._process is not None and self._made_of != {name: recipe_config.get(name) for name in PROCESS_SETTINGS}:
            self.stop()
        self.start(recipe_config)
        process, requests, watch = self._process, self._requests, self._watch
        assert process is not None and requests is not None and watch is not None
        log = output / "train.log"
        process.log_task_to(log)
        process.progress.unlink(missing_ok=True)
        text = write_recipe_config(recipe_config, output / "grpo.yaml")
        self._asked += 1
        answer = requests.answer(self._asked)
        requests.put(requests.request(self._asked), text)

        def answered() -> bool:
            if answer.exists():
                return True
            if self._has_ended(process) and not answer.exists():
                raise TrainerError(f"the resident trainer ended by itself in the middle of an iteration; see {log}")
            return False

        def over() -> None:
            process.log_task_to(None)
            self._training = None

        return Training(process, output, self._failing_as_over(answered, self._forget), over, watch.wait, **bar)

    def _has_ended(self, process: TrainerProcess) -> bool:
        """As `TrainerProcess.ended`, and says it where the other machines did not come: another start would not mend that."""
        try:
            return process.ended()
        except TrainerDiedError as error:
            if self._config.nnodes == 1 or self._requests is None or "RendezvousTimeoutError" not in str(error):
                raise
            raise TrainerError(
                f"of {self._config.nnodes} machines only {1 + arrived(self._requests.path)} were there within "
                f"{self._config.join_timeout} s (join_timeout); run `ttrl join {self._folder.path}` on the others, and start "
                f"the same command again. Each machine must reach the first one at {self._config.endpoint()}, and the others at "
                "any port"
            ) from error

    def _failing_as_over(self, is_done: Callable[[], bool], over: Callable[[], None]) -> Callable[[], bool]:
        def judged() -> bool:
            try:
                return is_done()
            except TtrlError:  # it is gone; after Ctrl-C it is not, and `stop` has to find it
                over()
                raise

        return judged

"""Run a trainer on several machines of a cluster: one actor with a torchrun on each, in a placement
group with STRICT_SPREAD.

They meet at an address of the first machine, at a free port (`ttrl.launch.nodes`). A dead machine
ends the trainer; the loop starts another one and waits for as many machines again.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ttrl.cluster.ray_connection import (
    ASK_SECONDS,
    RAY,
    START_SECONDS,
    Cluster,
    Words,
    as_words,
    begin_actor,
    from_words,
    has_gpus,
)
from ttrl.configs.run import TrainConfig
from ttrl.errors import TrainerDiedError, TrainerError, TtrlError, UserError
from ttrl.launch.nodes import PROGRESS_FILE, network_environment, torchrun_arguments
from ttrl.launch.tune import TrainerProcess, tune_command

_LOOK_SECONDS = 0.5
_STOP_SECONDS = 10.0


class TrainerNode:
    """Run one machine's part of the trainer."""

    def __init__(self) -> None:
        self._process: TrainerProcess | None = None

    def endpoint(self) -> str:
        """Return an address of this machine with a free port."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            if ":" in host:
                return f"[{host}]:{probe.getsockname()[1]}"
            return f"{host}:{probe.getsockname()[1]}"

    def start(
        self,
        config: TrainConfig,
        path: Path,
        log: Path,
        variables: Mapping[str, str],
        endpoint: str,
        leads: bool,
    ) -> Any:
        """Start its torchrun; return the error, or None."""
        try:
            if not (path / "start.yaml").is_file():
                raise UserError(
                    f"{path} is not on {socket.gethostname()}; put the run folder on a file system "
                    "of all machines"
                )
            torchrun = torchrun_arguments(
                config.nnodes, endpoint, path.name, leads=leads, join_timeout=config.join_timeout
            )
            command = tune_command(
                path / "start.yaml", nproc_per_node=config.processes_here, torchrun_args=torchrun
            )
            variables = network_environment(endpoint) | dict(variables)
            self._process = TrainerProcess(command, log, path / PROGRESS_FILE, variables).start()
        except TtrlError as error:
            return as_words(error)

    def ended(self) -> tuple[bool, Words | None]:
        """Return (has ended, error)."""
        assert self._process is not None
        try:
            return self._process.ended(), None
        except TtrlError as error:
            return True, as_words(error)

    def log_task_to(self, path: Path | None) -> None:
        """See `TrainerProcess.log_task_to`."""
        if self._process is not None:
            self._process.log_task_to(path)

    def stop(self) -> None:
        """End its processes."""
        if self._process is not None:
            self._process.stop()


class ClusterTrainer(TrainerProcess):
    """Present the machines' parts as one process: the lead's side. path: the folder of this start;
    log: the first machine's.
    """

    def __init__(
        self,
        config: TrainConfig,
        path: Path,
        log: Path,
        variables: Mapping[str, str],
        cluster: Cluster = RAY,
    ) -> None:
        super().__init__(["torchrun", "--nnodes", str(config.nnodes)], log, path / PROGRESS_FILE)
        self._config, self._path, self._log, self._variables = config, path, log, dict(variables)
        self._cluster = cluster
        self._nodes: list[Any] = []
        self._group: Any = None
        self._look_at = 0.0

    def start(self) -> "ClusterTrainer":
        """Reserve the machines and start their parts. Raises TrainerError unless enough are free
        within `join_timeout`.
        """
        config = self._config
        count = self._config.nnodes
        kind = "GPU" if has_gpus(config) else "CPU"
        self._group = placement_group(
            [{kind: config.processes_here}] * count, strategy="STRICT_SPREAD"
        )
        try:
            if not self._group.wait(config.join_timeout):
                raise TrainerError(
                    f"the cluster has no {count} machines with {config.processes_here} free "
                    f"{kind}s (nnodes, nproc_per_node) after {config.join_timeout} s "
                    "(join_timeout); `ray status` lists what is in use"
                )
            for number in range(count):
                place = PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                )
                takes = {f"num_{kind.lower()}s": config.processes_here}
                options = {"num_cpus": 0, **takes, "scheduling_strategy": place}
                self._nodes.append(begin_actor(TrainerNode, options))
            self._cluster.wait(
                [node.__ray_ready__.remote() for node in self._nodes],
                num_returns=count,
                timeout=START_SECONDS,
            )
            endpoint = self._ask(0, self._nodes[0].endpoint.remote)
            for number, node in enumerate(self._nodes):
                if number == 0:
                    log = self._log
                else:
                    log = self._log.with_name(f"{self._log.stem}-node{number}.log")
                arguments = (config, self._path, log, self._variables, endpoint, number == 0)
                words = self._ask(number, node.start.remote, *arguments)
                if words is not None:
                    raise from_words(words)
        except BaseException:
            self.stop()
            raise
        return self

    def ended(self) -> bool:
        """See `TrainerProcess.ended`; polls twice a second. Any end releases the machines, for the
        next start."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            ended = self._have_ended()
        except TtrlError:
            self.stop()
            raise
        if ended:
            self.stop()
        return ended

    def _have_ended(self) -> bool:
        answers = [self._ask(number, node.ended.remote) for number, node in enumerate(self._nodes)]
        wrong = [from_words(words) for _, words in answers if words is not None]
        if wrong:  # a process's own error before other processes' reports of its end
            raise min(wrong, key=lambda error: isinstance(error, TrainerDiedError))
        return all(ended for ended, _ in answers)

    def log_task_to(self, path: Path | None) -> None:
        """See `TrainerProcess.log_task_to`."""
        if self._nodes:
            with contextlib.suppress(TrainerDiedError):  # the next poll reports it
                self._ask(0, self._nodes[0].log_task_to.remote, path)

    def stop(self, timeout: float = 1.0) -> int | None:
        """End all parts and release the machines."""
        nodes = self._nodes
        self._nodes = []
        if nodes:
            stops = [node.stop.remote() for node in nodes]
            self._cluster.wait(stops, num_returns=len(stops), timeout=_STOP_SECONDS)
        for node in nodes:
            self._cluster.kill(node)
        group = self._group
        self._group = None
        if group is not None:
            remove_placement_group(group)
        return None

    def _ask(self, number: int, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._cluster.get(method(*arguments), timeout=ASK_SECONDS)
        except ray.exceptions.RayError as error:
            if isinstance(error, TimeoutError):
                what = f"has not answered for {ASK_SECONDS:.0f} s"
            else:
                what = f"is gone: {error}"
            raise TrainerDiedError(
                f"trainer machine {number} of {self._config.nnodes} {what}"
            ) from error

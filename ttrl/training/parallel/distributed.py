"""Place this process among a training run's processes, choose its device, and end all together.

torchrun starts them, on one machine or several, and describes them in the environment (WORLD_SIZE,
RANK, LOCAL_RANK, MASTER_ADDR). They form a grid, data × tensor: a tensor row shares the layers and
sees the same packed rows; a data column holds the same part of each layer and sees different rows.
gloo on CPU, NCCL on CUDA (run with one GPU only).

All messages except the model's tensors use a separate gloo group. So does each wait for the first
process's file writes: servers may have the GPUs by then, and nothing must run there.
"""

import contextlib
import functools
import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from torch import distributed
from torch._C._distributed_c10d import FileStore, HashStore, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from ttrl.configs import TrainingConfig
from ttrl.configs.recipe import STORE_VARIABLE, read_settings
from ttrl.errors import ConfigError, TtrlError
from ttrl.families.values import model_settings
from ttrl.system.files import read_object
from ttrl.system.memory_limit import memory_bytes
from ttrl.text import number_of

C = TypeVar("C", bound=TrainingConfig)

DATA, TENSOR = "data", "tensor"  # the grid's dimensions


@dataclass(frozen=True)
class Ranks:
    """This process within the training run. `rank` and `world_size` count processes with different
    rows.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """The grid, with dimensions DATA and TENSOR; None without a process group."""
    tensor_rank: int = 0
    tensor_ranks: int = 1
    host_name: Any = None
    """The name of the host group, or None. Not the group, which ends with its last reference."""
    memory: Callable[[], tuple[float, float]] = memory_bytes
    """Returns the machine's total and free memory in bytes."""

    @property
    def is_first(self) -> bool:
        """True only in the process writing files."""
        return self.rank == 0 and self.tensor_rank == 0

    @property
    def processes(self) -> int:
        return self.world_size * self.tensor_ranks

    @property
    def host_group(self) -> distributed.ProcessGroup | None:
        """All processes, over gloo: for tensors in the CPU's memory. None without a process
        group."""
        if self.host_name is None:
            return None
        return _resolve_process_group(self.host_name)

    @property
    def data_group(self) -> distributed.ProcessGroup | None:
        """Processes with different rows and the same part of each layer; None stands for all."""
        if self.mesh is None:
            return None
        return self.mesh.get_group(DATA)

    @property
    def tensor_group(self) -> distributed.ProcessGroup | None:
        """The processes sharing each layer; None without tensor parallelism."""
        if self.mesh is None or self.tensor_ranks == 1:
            return None
        return self.mesh.get_group(TENSOR)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, on every rank; `values` is not modified."""
        if self.world_size == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total, group=self.data_group)
        return total

    def sum_of_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, on every one; `values` is not modified."""
        if self.processes == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Concatenate tensors of any lengths in rank order, on every rank and, for several ranks,
        in the CPU's memory."""
        if self.world_size == 1:
            return values
        return torch.cat(self.rows_of_each(values)[self.tensor_rank :: self.tensor_ranks])

    def rows_of_each(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of every process, on every one and in the CPU's memory, the first one's
        first; each may have another number of them, of the same shape and dtype. Exchanges them
        over the host group.
        """
        rows = rows.cpu()
        if self.processes == 1:
            return [rows]
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self.processes)]
        distributed.all_gather(counts, torch.tensor([len(rows)]), group=self.host_group)
        lengths = [int(count) for count in counts]
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in lengths]
        if padded.numel():
            distributed.all_gather(found, padded, group=self.host_group)
        return [part[:length] for part, length in zip(found, lengths, strict=True)]

    def texts_of_each(self, text: str) -> list[str]:
        """Return every process's texts, on every process, the first one's first."""
        letters = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return [bytes(found.tolist()).decode() for found in self.rows_of_each(letters)]

    def barrier(self) -> None:
        """Wait for all processes, on the CPU. Fails at once if one of them has died, and after the
        group's timeout if one of them does not come."""
        if self.processes > 1:
            # Not `distributed.barrier`: it puts its tensor on the GPU for any group.
            distributed.all_reduce(torch.zeros(1), group=self.host_group)


def parse_config(config_class: type[C], raw: Any) -> C:
    """Parse an OmegaConf mapping as a recipe's config. Raises ConfigError."""
    values: Any = OmegaConf.to_container(raw, resolve=True)
    return config_class.parse(values, "recipe config")


def run_on_ranks(
    make_config: Callable[[], C], work: Callable[[C, "Ranks"], None], logger: logging.Logger
) -> int:
    """Join the config's other ranks, and work. Returns the exit code: a TtrlError is logged without
    a traceback.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        config = make_config()
        with ranks(config) as here:
            work(config, here)
    except TtrlError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


def run_recipe(config_class: type[C], train: Callable[[C, "Ranks"], None], raw: Any) -> int:
    return run_on_ranks(
        lambda: parse_config(config_class, raw), train, logging.getLogger(train.__module__)
    )


def recipe_main(parsed: Callable[[], int]) -> Callable[[], int]:
    """Return a recipe's `main`: torchtune's, after a check of the --config file; torchtune would
    refuse a bad one with a traceback.
    """

    def main() -> int:
        for option, path in itertools.pairwise(sys.argv):
            if option == "--config" and isinstance(why := read_settings(path), str):
                sys.stderr.write(f"error: --config is {path!r}, {why}\n")
                return 2
        return parsed()

    return main


def model_shape(folder: str) -> Mapping[str, Any]:
    """Return the settings in config.json (`model_settings`); empty if unreadable, for loading to
    report.
    """
    try:
        return model_settings(read_object(Path(folder, "config.json")))
    except (OSError, ValueError):
        return {}


def _device_for(config: TrainingConfig, processes: int) -> str:
    """Return the device. Raises ConfigError with all conflicts between it, the number of processes
    and the model's shape.
    """
    wanted = (
        config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    problems = config.problems_here(wanted, processes, model_shape(config.model))
    if wanted == "cuda" and not torch.cuda.is_available():
        problems.insert(
            0, "device is 'cuda', but PyTorch sees no CUDA device; use 'cpu', or run `ttrl doctor`"
        )
    if problems:
        raise ConfigError("config", problems)
    return wanted


def check_here(config: TrainingConfig, here: Ranks) -> None:
    """Raise ConfigError if the running processes were started for another config, or cannot train
    this one.
    """
    wanted = _device_for(config, here.processes)
    if wanted == here.device.type:
        found = []
    else:
        found = [
            f"device is {wanted!r}, but this trainer was started on {here.device.type!r}; start it "
            "again"
        ]
    if config.tensor_parallel != here.tensor_ranks:
        found.append(
            f"tensor_parallel is {config.tensor_parallel}, but this trainer was started with "
            f"{here.tensor_ranks}; start it again"
        )
    if config.num_threads not in (None, torch.get_num_threads()):
        found.append(
            f"num_threads is {config.num_threads}, but this trainer was started with "
            f"{torch.get_num_threads()}; start it again"
        )
    if found:
        raise ConfigError("config", [f"{problem}; restart it" for problem in found])


def seconds_to_wait(config: TrainingConfig) -> int:
    """Return how long one process waits for the others unless `collective_timeout` says so. The
    longest wait is for the first one to write the optimizer's state: four times the bytes of a
    model in bf16, at the 100 MB/s of a slow network disk.
    """
    folders = [Path(config.model), Path(config.lora_base or config.model)]
    return (
        600
        + max(
            sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in folders
        )
        * 4
        // 10**8
    )


@contextlib.contextmanager
def ranks(
    config: TrainingConfig,
    init_group: Callable[..., None] = distributed.init_process_group,
) -> Iterator[Ranks]:
    """Join the process group described by torchrun's environment, if any, and leave it at the end.
    Raises ConfigError with all conflicts between the device, the number of processes and the
    model's shape, before anything is loaded. init_group: joins the group.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = _device_for(config, world_size)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if wanted == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1 and not config.cpu_offload:
        yield Ranks(0, 1, device)
        return
    # Parked or offloaded tensors are gathered on the CPU.
    if device.type == "cpu":
        backend = "gloo"
    else:
        backend = "cuda:nccl,cpu:gloo"
    timeout = timedelta(seconds=config.collective_timeout or seconds_to_wait(config))
    join = functools.partial(
        init_group,
        backend,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    path = os.environ.get(STORE_VARIABLE)
    if world_size == 1:
        join(store=HashStore(), rank=0, world_size=1)
    elif path is not None:  # no process listens
        store = FileStore(path, world_size)
        store.set_timeout(timeout)
        join(store=store, rank=int(os.environ["RANK"]), world_size=world_size)
    else:
        join()
    with contextlib.ExitStack() as leaving:
        leaving.callback(distributed.destroy_process_group)
        here = grid(device, config.tensor_parallel, timeout)
        leaving.callback(_release_groups, here)
        yield here


def _release_groups(here: Ranks) -> None:
    """Drop all other references to the groups, so that destroying them waits for gloo's workers.
    A worker needs the GIL to free its last message. If Python ends first, the process aborts
    (SIGABRT) with its work done.
    """
    # Only a group's destructor waits, and meshes keep their groups; so do cycles in FSDP's modules.
    getattr(here.mesh, "_pg_registry", {}).clear()
    gc.collect()


def grid(device: torch.device, tensor_ranks: int, timeout: timedelta | None = None) -> Ranks:
    """Return this process's place in the data × tensor grid over the whole process group, with a
    `timeout` for its messages. Neighbours share layers: they are on one machine. A collective.
    """
    world_size = distributed.get_world_size()
    mesh = init_device_mesh(
        device.type, (world_size // tensor_ranks, tensor_ranks), mesh_dim_names=(DATA, TENSOR)
    )
    # A group for a part of the grid gets PyTorch's default timeout, for gloo 30 minutes.
    if timeout is not None:
        for name in (DATA, TENSOR):
            _set_pg_timeout(timeout, mesh.get_group(name))
    return Ranks(
        rank=mesh.get_local_rank(DATA),
        world_size=world_size // tensor_ranks,
        device=device,
        mesh=mesh,
        tensor_rank=mesh.get_local_rank(TENSOR),
        tensor_ranks=tensor_ranks,
        host_name=distributed.new_group(backend="gloo", timeout=timeout).group_name,
    )


def derived_generator(*parts: int | str) -> torch.Generator:
    """Return a random generator seeded only by its arguments, (seed, iteration, …)."""
    return torch.Generator().manual_seed(number_of(repr(parts)))

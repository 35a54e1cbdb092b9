"""The processes of one training run: who am I, where do I compute, how do we end together."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from torch import distributed

from ttrl.configs import TrainingConfig
from ttrl.errors import ConfigError, TtrlError

C = TypeVar("C", bound=TrainingConfig)


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes files."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, on every rank; `values` is left alone."""
        if self.world_size == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """One-dimensional tensors of any lengths, concatenated in the order of the ranks, on every rank."""
        if self.world_size == 1:
            return values
        parts: list[torch.Tensor | None] = [None] * self.world_size
        distributed.all_gather_object(parts, values.cpu())
        return torch.cat([part for part in parts if part is not None])

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            distributed.barrier()


def run_recipe(config_class: type[C], train: Callable[[C, "Ranks"], None], raw: Any) -> int:
    """Parses a recipe's config (an OmegaConf mapping), joins the other ranks and trains. Returns the exit code: what ttrl
    raises on purpose is logged as one message without a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        config = config_class.parse(OmegaConf.to_container(raw, resolve=True), "recipe config")  # type: ignore[arg-type]
        with ranks(config) as here:
            train(config, here)
    except TtrlError as error:
        logging.getLogger(train.__module__).error("%s: %s", type(error).__name__, error)
        return 1
    return 0


@contextlib.contextmanager
def ranks(config: TrainingConfig) -> Iterator[Ranks]:
    """Joins the process group that torchrun described in the environment, if any, and leaves it at the end.

    Raises ConfigError where the config asks for a device that is not there.
    """
    wanted = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("config", ["device is 'cuda', but PyTorch sees no CUDA device; use 'cpu', or run `ttrl doctor`"])
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if wanted == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, device)
        return
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    try:
        yield Ranks(distributed.get_rank(), world_size, device)
    finally:
        distributed.destroy_process_group()

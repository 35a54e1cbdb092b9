"""Keep a recipe and its state alive between iterations: policy, optimizer and value head.

Configs appear one after the other in a folder (`ttrl.system.request_folder`). Each rank polls it by
itself: no collective can time out while idle. Any error ends the process with the same message as
the one-shot form: memory may hold half a step by then.

An iteration names its starting files, a model folder and a state. Memory is used instead if it is
known to hold the same: this process wrote these very files, or read them, and none has changed
since (by inode, size and times). Otherwise the files are read, as in a new process: after a kill,
for a retrained iteration, for a file placed by hand, and for any changed setting. Both produce the
same weights, bit for bit; with one exception: layers compiled for lengths of earlier iterations.

If files hold less than memory does (weights or moments rounded when written), memory takes the
files' values.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.errors import RunFolderError, StorageError, TtrlError
from ttrl.facts import SamplerTrainer
from ttrl.records import ADAPTER_FOLDER, Canary, Handover
from ttrl.system.files import again
from ttrl.system.request_folder import RequestFolder
from ttrl.training.checkpoints import hand_over
from ttrl.training.optimizer.implicit_reward import FOLDER as REWARD_MODEL
from ttrl.training.optimizer.implicit_reward import RewardModel
from ttrl.training.optimizer.value_training import ValueTraining
from ttrl.training.parallel.distributed import Ranks, check_here, parse_config, run_on_ranks
from ttrl.training.parallel.host_memory import places
from ttrl.training.parallel.sharding import reset_shards
from ttrl.training.parallel.weight_memory import WeightMemory
from ttrl.training.policy.adapters import base_folder
from ttrl.training.policy.loading import load_policy, seed_dropout
from ttrl.training.policy.policy import Policy, fill_parameters
from ttrl.training.stepper import Stepper

logger = logging.getLogger("ttrl.training")

# Settings free to change between iterations with the same model, optimizer and schedule.
_OF_ONE_ITERATION = (
    *(
        "model",
        "state",
        "packed",
        "output_dir",
        "iteration",
        "follow",
        "sampler_model",
        "sampler_version",
        "save",
        "kept",
    ),
)


class Trained(NamedTuple):
    """The trained objects."""

    policy: Policy
    stepper: Stepper
    values: ValueTraining | None
    rewards: RewardModel | None = None


def load_trained(config: GRPOConfig, here: Ranks) -> Trained:
    """Load the starting model and state of `config`. A collective. Raises ModelFolderError,
    RunFolderError and ConfigError.
    """
    policy = load_policy(config, here)
    if config.value_head:
        values = ValueTraining(config, policy.decoder.tok_embeddings.embedding_dim, here)
    else:
        values = None
    rewards = None
    if config.token_rewards == "implicit":
        rewards = RewardModel(policy, config, here)
    stepper = Stepper(policy, config, here, config.state, values, rewards)
    return Trained(policy, stepper, values, rewards)


Files = tuple[tuple[Any, ...], ...]
"""Identity of files, to detect changes: name, device, inode, size, and times of content and entry
of each.
"""


class Residence:
    """Holds the trained objects for the next iteration; one per rank. Its methods are collectives.

    trained = residence.enter(config)
    …                                     # train, write checkpoint and state
    residence.leave(config, trained)      # without it nothing is kept: half a step must not be
                                          continued
    """

    def __init__(
        self,
        here: Ranks,
        handed_over: Callable[[Handover], None] = lambda handover: None,
        parks: bool | None = None,
    ) -> None:
        """Make an empty one. `handed_over` is called with the message for servers, before
        checkpoint and state are written. parks: whether to move what waits into a block of the
        CPU's memory; default: if it does not live on the CPU anyway."""
        self._parks = parks
        self._here = here
        self._tell = handed_over
        self._kept: tuple[Trained, dict[str, object], Files | int] | None = None
        """The trained objects, their settings, and their files; or their iteration, if no files
        were written.
        """
        self._memory = WeightMemory(here)
        self._is_parked = False
        self.canary: Canary | None = None
        """The canary of the last transfer."""

    def enter(self, config: GRPOConfig, computes: bool = True) -> Trained:
        """Return the starting point of `config`: from memory if it is the same there, else from its
        files. Raises ModelFolderError, RunFolderError and ConfigError as loading does,
        RunFolderError also if memory must hold it and does not.

        computes: move parked tensors back to the device; else they stay parked, as servers may have
            the device.
        """
        kept = self._kept
        self._kept = None
        is_parked = self._is_parked
        self._is_parked = False
        wanted = _inputs(config) if config.kept is None else config.kept
        same = kept is not None and kept[1] == _settings(config) and kept[2] == wanted
        if self._agreed(same):
            assert kept is not None
            trained = kept[0]
            if is_parked and computes:
                self._unpark(trained)
            else:
                self._is_parked = is_parked
        elif config.kept is not None:
            raise RunFolderError(
                f"the result of iteration {config.kept} is neither in this process nor in a file; "
                f"the same command trains it again from {config.model}"
            )
        else:
            if kept is not None:
                logger.info(
                    "the files or settings of this iteration differ from those in memory; loading "
                    "%s",
                    config.model,
                )
            del kept  # two models would not fit
            gc.collect()
            trained = load_trained(config, self._here)
        seed_dropout(config, self._here)
        return trained

    def leave(self, config: GRPOConfig, trained: Trained, is_written: bool = True) -> None:
        """Keep the trained objects for the next iteration. Call it after checkpoint and state were
        written, if they are."""
        if not is_written:
            return self._keep(config, trained, config.iteration)
        output = Path(config.output_dir)
        written = dataclasses.replace(
            config, model=str(output / "checkpoint"), state=str(output / "state")
        )
        if config.checkpoint_dtype != "fp32" and config.lora_rank is None:
            fill_parameters(
                trained.policy.parameters_by_name(),
                written.model,
                decoder=trained.policy.chosen_decoder,
            )
        if config.optimizer == "adamw_8bit" and self._here.processes > 1:
            trained.stepper.load(output / "state")
        self.keep(written, trained)

    def hand_over(
        self,
        config: GRPOConfig,
        trained: Trained,
        canary: Canary,
        compared: SamplerTrainer | None = None,
    ) -> bool:
        """Transfer the policy to servers, if `config` says so, before anything is written; return
        whether it is there. Servers sharing the device may use it from then on: everything here is
        parked, and written from there. No process runs anything on the device until the next
        iteration.

        canary: the expected outputs. compared: train.jsonl's comparison of sampler and trainer, in
            time for the transfer.
        """
        if not config.hand_over:
            return False
        try:
            parts = hand_over(self._memory, trained.policy, config.model, config.checkpoint_dtype)
            if config.free_memory:
                self._park(trained)
        except StorageError as error:
            self._memory.close()
            logger.warning("servers must read files: %s", error)
            return False
        self.canary = canary
        self._here.barrier()  # the others have left it, too
        self._tell(Handover(self._memory.path, parts, canary, compared=compared))
        return True

    def prepare(self, config: GRPOConfig) -> None:
        """Load the start of `config` in advance. Errors are left for the iteration to report."""
        try:
            self.keep(config, load_trained(config, self._here))
        # Out of memory: PyTorch has no separate class for the CPU's.
        except (TtrlError, MemoryError, RuntimeError) as error:
            self._kept = None
            logger.info("nothing is loaded yet: %s", error)

    def keep(self, config: GRPOConfig, trained: Trained) -> None:
        """Keep the objects loaded for `config`, unchanged, for the next request; nothing if they
        should leave the GPU and the CPU's memory is too small."""
        try:
            self._keep(config, trained, _inputs(config))
        except StorageError as error:
            logger.warning(
                "the next iteration will read the trainer's weights and state from files: they "
                "cannot wait in memory while servers have the GPU; %s. Adapters (lora_rank) or "
                "optimizer 'adamw_8bit' need less, placement 'split' none",
                error,
            )

    def _keep(self, config: GRPOConfig, trained: Trained, what: Files | int) -> None:
        if config.free_memory and not self._is_parked:
            self._park(trained)
        self._kept = trained, _settings(config), what

    def _park(self, trained: Trained) -> None:
        if self._leaves_device(trained):
            park(trained)
        self._is_parked = True

    def _unpark(self, trained: Trained) -> None:
        if self._leaves_device(trained):
            unpark(trained, self._here.device)

    def _leaves_device(self, trained: Trained) -> bool:
        if self._parks is None:
            return not trained.stepper.lives_on_cpu
        return self._parks

    def _agreed(self, mine: bool) -> bool:
        """Return the first rank's answer: a file in transit looks different on another host."""
        answers = self._here.rows_of_each(torch.tensor([mine]))
        return bool(answers[0])


def _settings(config: GRPOConfig) -> dict[str, object]:
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in _OF_ONE_ITERATION
    }


def _inputs(config: GRPOConfig) -> Files:
    """Return the facts of the source files of policy, optimizer, value head and reward model."""
    folders = [Path(config.model), Path(config.model, ADAPTER_FOLDER)]
    if config.lora_rank is not None:
        folders.append(Path(base_folder(config)))
    weights = [
        found for number, folder in enumerate(folders) for found in _files(folder, str(number))
    ]
    if config.state is None:
        state = []
    else:
        folder = Path(config.state)
        state = [*_files(folder, "state"), *_files(folder / REWARD_MODEL, REWARD_MODEL)]
    return (*weights, *state)


def _files(folder: Path, label: str) -> Iterator[tuple[Any, ...]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            if path.name == "canary.json":  # describes the weights, and holds none
                continue
            stat = path.stat()
            yield (
                label,
                path.name,
                stat.st_dev,
                stat.st_ino,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )


@torch.no_grad()
def park(trained: Trained) -> None:
    """Move everything into the CPU's memory, except permanent device tensors. A collective. Raises
    StorageError if there is too little memory; nothing has moved then."""
    memory = trained.policy.host_memory
    found = _places(trained)
    assert memory is not None
    for (owner, name), copy in zip(
        found, memory.hold([getattr(owner, name) for owner, name in found]), strict=True
    ):
        setattr(owner, name, copy)
    reset_shards(trained.policy)
    _empty_caches()


@torch.no_grad()
def unpark(trained: Trained, device: torch.device) -> None:
    """Move parked tensors back to the device."""
    for owner, name in _places(trained):
        setattr(owner, name, getattr(owner, name).to(device, non_blocking=True, copy=True))
    reset_shards(trained.policy)


def _places(trained: Trained) -> list[tuple[Any, str]]:
    """Return the places of device tensors in policy, value head, reward model and optimizers."""
    # Shards, even if a pass left whole parameters.
    tensors: list[Tensor] = list(trained.policy.parameters_by_name().values())
    if trained.values is not None:
        tensors += trained.values.head.parameters()
    tensors += trained.stepper.tensors()
    if trained.values is not None:
        tensors += trained.values.tensors()
    if trained.rewards is not None:
        tensors += trained.rewards.tensors()
    return [place for tensor in tensors for place in places(tensor)]


def _empty_caches() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def follow_requests(train: Callable[[GRPOConfig, Ranks, Residence], None], raw: Any) -> int:
    """Train every config from the folder `raw.follow`, until told to stop or the folder is gone.
    Returns the exit code.
    """
    return run_on_ranks(
        lambda: parse_config(GRPOConfig, raw), functools.partial(_serve, train), logger
    )


def _serve(
    train: Callable[[GRPOConfig, Ranks, Residence], None],
    start: GRPOConfig,
    here: Ranks,
    make: Callable[[Ranks, Callable[[Handover], None]], Residence] = Residence,
) -> None:
    assert start.follow is not None
    folder = RequestFolder(start.follow)
    number = 0

    def tell(handover: Handover) -> None:
        if here.is_first:
            folder.put_handover(number, handover)

    residence = make(here, tell)
    residence.prepare(start)
    _give_back_memory()
    logger.info("waiting for configs in %s", folder.path)
    for number in itertools.count(1):
        request = folder.next_request(number)
        if request is None:
            return
        began = time.perf_counter()
        config = parse_config(GRPOConfig, again(functools.partial(OmegaConf.load, request)))
        with _output_to(Path(config.output_dir, "train.log")):
            check_here(config, here)
            train(config, here, residence)
        _give_back_memory()  # before others may use it
        here.barrier()
        if here.is_first:
            folder.put_answer(number, {"seconds": time.perf_counter() - began})


def _give_back_memory() -> None:
    """Return memory cached by PyTorch and C's allocator, the latter a third as measured, for the
    server to use while we wait.
    """
    _empty_caches()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Append all output of this process, C libraries included, to `log`; after an error that stays
    so.
    """
    # Appending from several hosts is not atomic.
    node = os.environ.get("GROUP_RANK", "0")
    if node != "0":
        log = log.with_name(f"train-node{node}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    yield
    _flush()
    for descriptor, old in zip((1, 2), before, strict=True):
        os.dup2(old, descriptor)
        os.close(old)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

"""Run a recipe that stays up and trains one config after the other, as they appear in a folder (`ttrl.system.request_folder`).

Each rank looks for the next config by itself, so that no collective waits and times out while there is nothing to do; once they
have seen it, they work as ranks always do. Any error ends the process with the same message as the one-shot form: memory may hold
half a step by then.
"""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ttrl.configs import GRPOConfig
from ttrl.system.request_folder import RequestFolder
from ttrl.training.parallel.distributed import Ranks, check_here, parse_config, run_on_ranks
from ttrl.training.residence import Residence

logger = logging.getLogger("ttrl.training")


def follow_requests(train: Callable[[GRPOConfig, Ranks, Residence], None], raw: Any) -> int:
    """Train every config that appears in the folder `raw.follow`, until told to stop or it is gone. Returns the exit code."""
    return run_on_ranks(lambda: parse_config(GRPOConfig, raw), functools.partial(_serve, train), logger)


def _serve(train: Callable[[GRPOConfig, Ranks, Residence], None], start: GRPOConfig, here: Ranks) -> None:
    assert start.follow is not None
    folder, residence = RequestFolder(start.follow), Residence(here)
    residence.prepare(start)
    logger.info("waiting for configs in %s", folder.path)
    for number in itertools.count(1):
        request = folder.next_request(number)
        if request is None:
            return
        began = time.perf_counter()
        config = parse_config(GRPOConfig, OmegaConf.load(request))
        with _output_to(Path(config.output_dir, "train.log")):
            check_here(config, here)
            train(config, here, residence)
        here.barrier()
        if here.is_first:
            folder.put_answer(number, {"seconds": time.perf_counter() - began})
        _give_back_memory()


def _give_back_memory() -> None:
    """Return the free memory that C's allocator holds on to, a third as measured, for the server to use while we wait."""
    with contextlib.suppress(OSError, AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Append everything that this process prints, C libraries included, to `log`; after an error that stays so."""
    if (node := os.environ.get("GROUP_RANK", "0")) != "0":  # appending from several hosts is not atomic
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

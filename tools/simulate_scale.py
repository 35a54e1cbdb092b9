"""How does a run's throughput grow from 1 to 1,000 replicas, and where does each design stop?

    python tools/simulate_scale.py [--out docs/explanation/scale.svg]

A discrete-event simulation of iterations: samples of lognormal lengths (a long tail) go to the
emptiest of n replicas, which fail and come back; whoever sends the requests is a queue with one
server, its CPU, and so is the lead of several. Then rows are packed, the trainer works, and weights
go to all replicas. The trainer grows with the replicas, so that it takes half as long as sampling
would without tails. docs/explanation/scale.md gives the sources of the constants
and lists what is left out.
"""

import argparse
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class World:
    """Constants. Times in seconds."""

    slots: int = 64
    """Completions that a replica computes at once."""
    token_seconds: float = 0.02
    """Of one completion, with all slots taken: 3,200 tokens per second and replica."""
    mean_tokens: float = 1000.0
    sigma: float = 0.8
    """Of the lognormal lengths; cut at 8 times the mean."""
    waves: int = 4
    """Samples per iteration, in slots."""
    look: float = 400e-6
    """CPU per look at a server's /metrics, once a second."""
    file_bytes: float = 15e9
    """Of a checkpoint."""
    file_rate: float = 5e9
    """Bytes per second of the shared file system, for all readers together."""
    link_rate: float = 20e9
    """Bytes per second into one replica, from memory."""
    copy_rate: float = 2e9
    """Bytes per second that one thread copies: the lead into Ray's object store, a replica out of
    it.
    """
    mean_life: float = 24 * 3600.0
    """Between failures of one replica."""
    repair: float = 300.0


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a process, for each sample and for each of its tokens."""

    sample: float
    token: float

    def of(self, tokens: float, samples: int = 1) -> float:
        """Return the seconds for so many tokens of so many samples."""
        return samples * self.sample + tokens * self.token


ALONE = Cost(500e-6, 1.5e-6)
ALONE_AFTER = Cost(130e-6, 1.1e-6)
"""One process for all: while it samples (choice of the server, HTTP, JSON, grading), and afterwards
(lines of files, rows).
"""
WORKER = Cost(900e-6, 1.3e-6)
LEAD = Cost(145e-6, 0.1e-6)
LEAD_AFTER = Cost(36e-6, 0.3e-6)
"""A worker; the lead meanwhile, and afterwards. tools/bench_workers.py measures all of these, for
requests of 8 samples.
"""


@dataclass(frozen=True)
class Design:
    """Which parts a run consists of."""

    name: str
    servers_per_process: float
    """How many replicas one sampling process looks after."""
    weights: Callable[[World, int], float]
    """Seconds until all replicas have new weights."""
    overlapped: bool = False
    """Whether sampling goes on while the trainer works, one policy behind."""


def through_files(world: World, count: int) -> float:
    """All replicas read the same files of one file system; each needs its link as well."""
    return max(count * world.file_bytes / world.file_rate, world.file_bytes / world.link_rate)


def broadcast(world: World, count: int) -> float:
    """A tree of copies: each one that has the weights hands them on."""
    return world.file_bytes / world.link_rate * (1 + math.log2(count) / 8)


def object_store(world: World, count: int) -> float:
    """Files for up to 4 replicas; for more, a tree of copies from store to store, into which one
    copies and out of which each.
    """
    return (
        through_files(world, count)
        if count <= 4
        else 2 * world.file_bytes / world.copy_rate + broadcast(world, count)
    )


DESIGNS = [
    Design("one process, files", math.inf, through_files),
    Design("a worker per 16 replicas, files", 16, through_files),
    Design("the same, object store (today)", 16, object_store),
    Design("the same, GPU to GPU", 16, broadcast),
    Design("the same, one policy behind", 16, broadcast, overlapped=True),
]


def sampling_seconds(
    world: World, count: int, per_process: float, generator: np.random.Generator
) -> tuple[float, float, int]:
    """Return (seconds, tokens, samples that had to be done again) of one iteration's sampling."""
    samples = world.waves * world.slots * count
    tokens = np.minimum(
        generator.lognormal(math.log(world.mean_tokens) - world.sigma**2 / 2, world.sigma, samples),
        8000.0,
    )
    processes = max(1, math.ceil(count / per_process))
    share = count / processes
    has_workers = math.isfinite(per_process)
    cpu_free = [0.0] * processes
    lead_free = 0.0
    slow = 1.0 / max(1e-3, 1.0 - share * world.look)  # what looking at /metrics leaves of a process
    fails_at = generator.exponential(world.mean_life, count)
    free = [(0.0, slot % count) for slot in range(world.slots * count)]
    heapq.heapify(free)
    waiting = list(tokens[::-1])
    end = again = 0.0
    while waiting:
        at, replica = heapq.heappop(free)
        length = waiting.pop()
        process = replica % processes
        if has_workers:
            at = lead_free = max(at, lead_free) + LEAD.of(length)
        begin = cpu_free[process] = (
            max(at, cpu_free[process]) + (WORKER if has_workers else ALONE).of(length) * slow
        )
        done = begin + length * world.token_seconds
        if begin < fails_at[replica] + world.repair and done > fails_at[replica]:
            back = fails_at[replica] + world.repair
            waiting.append(length)  # its tokens are lost, the sample is not
            again += 1
            heapq.heappush(free, (max(back, begin), replica))
            continue
        heapq.heappush(free, (done, replica))
        end = max(end, done)
    return end, float(tokens.sum()), int(again)


def throughput(
    world: World, design: Design, count: int, *, iterations: int = 3, seed: int = 0
) -> tuple[float, int]:
    """Return (tokens per second, samples done again) of a run with `count` replicas."""
    generator = np.random.default_rng(seed)
    seconds = tokens = 0.0
    again = 0
    training = 0.5 * world.waves * world.mean_tokens * world.token_seconds
    for _ in range(iterations):
        sampling, made, lost = sampling_seconds(world, count, design.servers_per_process, generator)
        sync = design.weights(world, count)
        after = LEAD_AFTER if math.isfinite(design.servers_per_process) else ALONE_AFTER
        sampling += after.of(made, world.waves * world.slots * count)
        seconds += (max(sampling, training) if design.overlapped else sampling + training) + sync
        tokens = tokens + made
        again = again + lost
    return tokens / seconds, again


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a picture of the curves (.svg, .png)")
    arguments = parser.parse_args()
    world = World()
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    curves = {
        design.name: [throughput(world, design, count) for count in counts] for design in DESIGNS
    }
    print(f"{'replicas':38}" + "".join(f"{count:>9}" for count in counts))
    for name, curve in curves.items():
        print(
            f"{name:38}"
            + "".join(f"{rate / 1e3:9.1f}" for rate, _ in curve)
            + "   thousand tokens/s"
        )
        print(f"{'  samples done again':38}" + "".join(f"{again:9d}" for _, again in curve))
    if arguments.out is not None:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4.5))
        for name, curve in curves.items():
            axes.loglog(counts, [rate for rate, _ in curve], marker="o", markersize=3, label=name)
        axes.loglog(
            counts,
            [count * curves[DESIGNS[-1].name][0][0] for count in counts],
            "k:",
            linewidth=1,
            label="linear",
        )
        axes.set_xlabel("replicas")
        axes.set_ylabel("trained tokens per second")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(
            arguments.out, metadata={"Date": None} if arguments.out.suffix == ".svg" else None
        )


if __name__ == "__main__":
    main()

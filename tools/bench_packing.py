"""How full are packed rows, and how long does packing take?

    python tools/bench_packing.py [--completions 2000] [--spread 0.8] [--seed 0] [--no-table]
        [--no-dealing] [--no-times]
        [--packs 50000] [--means 100 300 1000] [--input lists|arrays]

The table: unique useful tokens / (rows × seq_len) for lognormal completion lengths (`--spread`:
standard deviation of the logarithm), compared with greedy packing in the order given and with a
proven lower bound on the number of rows (placement_bounds.py). Each prompt counts as useful once,
and each completion. A completion is clipped to what fits after its prompt; a prompt is clipped to
half a row, which affects only prompts of 8,000 in rows of 4,096. All 96 settings count.

The dealing: how long data-parallel ranks would wait for each other (`balance` in
ttrl/data/packing/placement.py).

The times: 5,000, 50,000 and 200,000 completions placed, and `--packs` packed with their tensors, on
one thread, with the peak memory; in the setting with a mean of 300 and prompts of 1,000, each
completion has a prompt of its own.
"""

import argparse
import gc
import math
import resource
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

import numpy as np
import torch
from placement_bounds import lower_bound
from torch import Tensor

from ttrl.data.packing.masks import subtree_ends
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.placement import Forest, balance, in_order, place
from ttrl.records import TokenizedResult

SETTINGS = [
    (mean, prompt, n, seq_len)
    for mean in (100, 300, 1000, 4000)
    for prompt in (50, 200, 1000, 8000)
    for n in (8, 16, 50)
    for seq_len in (4096, 16384)
]

PACKED = [
    (100, 50, 8, 16384),
    (100, 200, 16, 4096),
    (300, 200, 16, 4096),
    (300, 1000, 1, 4096),
    (1000, 200, 16, 16384),
    (4000, 200, 8, 16384),
]


def lengths(
    mean: int, prompt: int, n: int, seq_len: int, completions: int, spread: float, seed: int
) -> tuple[int, np.ndarray]:
    """Positions of a prompt, and of completions [groups, n]."""
    rng = np.random.default_rng((seed, mean, prompt, n, seq_len))
    prompt = min(prompt, seq_len // 2)
    sizes = np.exp(
        rng.normal(math.log(mean) - spread**2 / 2, spread, (max(1, completions // n), n))
    )
    return prompt, np.clip(np.rint(sizes), 1, seq_len - prompt).astype(int)


def forest_of(prompt: int, sizes: np.ndarray) -> Forest:
    groups, n = sizes.shape
    return Forest(
        [prompt] * groups,
        [-1] * groups,
        np.repeat(np.arange(groups), n).tolist(),
        sizes.ravel().tolist(),
    )


def table(completions: int, spread: float, seed: int) -> None:
    print(
        f"{completions} completions, spread {spread}, seed {seed}; shares are unique useful "
        "tokens / (rows × seq_len)"
    )
    print(
        "completion prompt  n seq_len | rows bound in order | share bound in order | above bound "
        " seconds"
    )
    above = []
    seconds = 0.0
    worse = 0
    for mean, prompt, n, seq_len in SETTINGS:
        size, sizes = lengths(mean, prompt, n, seq_len, completions, spread, seed)
        forest = forest_of(size, sizes)
        start = time.process_time()
        rows = len(place(forest, seq_len))
        took = time.process_time() - start
        plain = len(in_order(forest, seq_len))
        bound = lower_bound([size] * len(sizes), sizes.tolist(), seq_len)
        useful = (int(sizes.sum()) + size * len(sizes)) / seq_len
        above.append(rows / bound - 1)
        seconds += took
        worse += rows > plain
        print(
            f"{mean:10} {prompt:6} {n:2} {seq_len:7} | {rows:4} {bound:5} {plain:8} | "
            f"{useful / rows:.3f} {useful / bound:.3f} "
            f"{useful / plain:8.3f} | {100 * above[-1]:10.1f}% {took:8.3f}"
        )
    order = np.argsort(above)[::-1]
    print(
        f"above the bound: mean {100 * np.mean(above):.2f}%, worst {100 * max(above):.1f}%; ",
        end="",
    )
    print(
        f"{sum(a > 0.05 + 1e-9 for a in above)} settings above 5%, "
        f"{sum(a > 0.02 for a in above)} above 2%, ",
        end="",
    )
    print(
        f"{sum(a == 0 for a in above)} at the bound (so optimal); worse than in order: {worse}; "
        f"placing took {seconds:.1f} s"
    )
    print(
        "farthest from it: " + "; ".join(f"{SETTINGS[i]} {100 * above[i]:.1f}%" for i in order[:5])
    )


def results_of(prompt: int, sizes: np.ndarray, kind: str) -> Iterator[TokenizedResult]:
    """Samples as the tokenizer makes them, with lists; or with arrays."""
    rng = np.random.default_rng(0)
    for group, row in enumerate(sizes):
        start = rng.integers(0, 1000, prompt, dtype=np.int32)
        for sample, size in enumerate(row.tolist()):
            length = prompt + size
            ids = np.concatenate([start, rng.integers(0, 1000, size, dtype=np.int32)])
            mask = np.arange(length) >= prompt
            logprobs = np.where(mask, np.float32(-1.0), np.float32(math.nan))
            arrays = kind == "arrays"
            yield TokenizedResult(
                task_id=str(group),
                sample=sample,
                token_ids=ids if arrays else ids.tolist(),
                assistant_mask=mask if arrays else mask.tolist(),
                input_pos=range(length),
                logprobs=logprobs if arrays else [math.nan] * prompt + [-1.0] * size,
                prompt_length=prompt,
                reward=0.0,
                advantage=1.0,
            )


def times(spread: float, seed: int) -> None:
    print("seconds of one core for placing 5,000, 50,000 and 200,000 completions")
    for setting in (
        (100, 50, 8, 16384),
        (1000, 200, 16, 4096),
        (300, 1000, 50, 16384),
        (4000, 50, 8, 4096),
    ):
        took = []
        for completions in (5_000, 50_000, 200_000):
            forest = forest_of(*lengths(*setting, completions, spread, seed))
            gc.disable()  # as packing does
            start = time.process_time()
            place(forest, setting[-1])
            gc.enable()
            took.append(time.process_time() - start)
        print(f"{setting!s:24} " + " ".join(f"{seconds:7.2f}" for seconds in took))


def gibibytes() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def packs(completions: int, spread: float, seed: int, kind: str, means: Sequence[int]) -> None:
    """One line per setting, each in a process of its own, as the peak of memory is one per
    process.
    """
    print(
        f"{completions:,} completions, {kind}, to packed tensors: seconds of one core the first "
        "time, and again in memory that"
    )
    print(
        "the process has used before (the first time, the system's memory for the tensors costs "
        "more than all else)"
    )
    print(
        "completion prompt  n seq_len | first again  ns/position |  rows positions/1e6 | GiB: "
        "input tensors peak"
    )
    for setting in PACKED:
        if setting[0] in means:
            process = get_context("fork").Process(
                target=pack_once, args=(setting, completions, spread, seed, kind)
            )
            process.start()
            process.join()
            if process.exitcode:
                print(f"{setting}: ended by {process.exitcode} (not enough memory?)")


def pack_once(
    setting: tuple[int, int, int, int], completions: int, spread: float, seed: int, kind: str
) -> None:
    mean, prompt, n, seq_len = setting
    results = list(results_of(*lengths(*setting, completions, spread, seed), kind))
    before = gibibytes()
    took = []
    packed = None
    for _ in range(2):
        packed = None
        start = time.process_time()
        packed = packed_tensors_from_tokenized_results(results, seq_len=seq_len, pad_id=0)
        took.append(time.process_time() - start)
    held = sum(tensor.nbytes for tensor in packed.tensors().values()) / 2**30
    print(
        f"{mean:10} {prompt:6} {n:2} {seq_len:7} | {took[0]:5.2f} {took[1]:5.2f} "
        f"{1e9 * took[1] / packed.num_tokens:12.0f} | "
        f"{packed.num_rows:5} {packed.num_tokens / 1e6:13.1f} | {before:10.1f} {held:7.1f} "
        f"{gibibytes():4.1f}",
        flush=True,
    )


def row_work(group_ids: Tensor, parent_ids: Tensor, width: int = 1024) -> list[float]:
    """The work of packed rows, in positions: what each stores, and its attention area. Both int64
    [B, T], -1 in padding.

    A layer of `width` d takes about 12·d² multiplications per position and 2·d per pair of
    positions where the later sees the earlier (Kaplan et al., arXiv 2001.08361, table 1), so a pair
    is worth 1/(6·d) of a position.
    """
    found = []
    for groups, parents in zip(group_ids.split(1), parent_ids.split(1), strict=True):
        used = groups >= 0
        # The position itself included.
        seen_by = subtree_ends(groups, parents) - torch.arange(groups.shape[1])
        found.append(int(used.sum()) + int(seen_by[used].sum()) / (6 * width))
    return found


def deal(work: Sequence[float], ranks: int) -> list[list[int]]:
    """The rows of each rank, in the order in which they are trained on."""
    order = balance(work, ranks)
    return [order[rank::ranks] for rank in range(ranks)]


def waiting(work: Sequence[float], ranks: Sequence[Sequence[int]], microbatch: int = 1) -> float:
    """The share of all ranks' time spent waiting, where all wait for each other after every
    `microbatch` rows.
    """
    spent = sum(
        max(sum(work[row] for row in rows[start : start + microbatch]) for rows in ranks)
        for start in range(0, max(map(len, ranks)), microbatch)
    )
    useful = sum(work[row] for rows in ranks for row in rows)
    return 1 - useful / (len(ranks) * spent) if spent else 0.0


def dealing(completions: int, spread: float, seed: int) -> None:
    """How long ranks wait for each other: rows dealt out in the order of packing, at random, and by
    `deal`.
    """
    print(
        "share of the ranks' time in which one waits for another: rows in random order, and as "
        "dealt out (1 row at a time)"
    )
    print(
        "completion prompt  n seq_len ranks | rows random dealt | work of the busiest rank above "
        "the mean: random dealt"
    )
    for mean, prompt, n, seq_len in (
        (100, 50, 8, 16384),
        (300, 200, 16, 4096),
        (1000, 200, 16, 16384),
        (1000, 1000, 8, 4096),
    ):
        results = list(
            results_of(*lengths(mean, prompt, n, seq_len, completions, spread, seed), "arrays")
        )
        for ranks in (2, 8):
            packed = packed_tensors_from_tokenized_results(
                results, seq_len=seq_len, pad_id=0, multiple=ranks
            )
            cost = row_work(packed.group_ids, packed.parent_ids)
            order = np.random.default_rng(seed).permutation(len(cost)).tolist()
            ways = [[order[rank::ranks] for rank in range(ranks)], deal(cost, ranks)]
            most = [
                max(sum(cost[row] for row in rows) for rows in way) / (sum(cost) / ranks) - 1
                for way in ways
            ]
            waits = [waiting(cost, way) for way in ways]
            print(
                f"{mean:10} {prompt:6} {n:2} {seq_len:7} {ranks:5} | {len(cost):4} "
                f"{waits[0]:6.2%} {waits[1]:5.2%} | "
                f"{most[0]:6.2%} {most[1]:.3%}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-dealing", action="store_true")
    parser.add_argument(
        "--packs", type=int, default=50_000, help="completions that are packed with their tensors"
    )
    parser.add_argument(
        "--means",
        type=int,
        nargs="*",
        default=[100, 300, 1000],
        help="4000 takes 20 GiB with 50,000 completions",
    )
    parser.add_argument("--input", choices=["lists", "arrays"], default="lists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.no_table:
        table(args.completions, args.spread, args.seed)
    if not args.no_dealing:
        dealing(args.completions, args.spread, args.seed)
    if not args.no_times:
        times(args.spread, args.seed)
        packs(args.packs, args.spread, args.seed, args.input, args.means)


if __name__ == "__main__":
    main()

"""How full are packed rows, and how long does packing take?

    python tools/bench_packing.py [--completions 2000] [--spread 0.8] [--seed 0] [--no-table] [--no-times]

The table: unique useful tokens / (rows × seq_len) for lognormal completion lengths (`--spread`: standard deviation of the
logarithm), beside greedy packing in the order given and a proven lower bound on the number of rows
(ttrl/data/placement_bounds.py). Useful are each prompt once and each completion. A completion is clipped to what fits beside its
prompt; a prompt is clipped to half a row, which concerns prompts of 8,000 in rows of 4,096 only. All 96 settings count.

The times: 5,000, 50,000 and 200,000 completions placed, and 50,000 packed with their tensors, on one thread.
"""

import argparse
import math
import resource
import time

import numpy as np
import torch

from ttrl.data.packing import packed_tensors_from_tokenized_results
from ttrl.data.placement import Forest, in_order, place
from ttrl.data.placement_bounds import lower_bound
from ttrl.records import TokenizedResult

SETTINGS = [
    (mean, prompt, n, seq_len)
    for mean in (100, 300, 1000, 4000)
    for prompt in (50, 200, 1000, 8000)
    for n in (8, 16, 50)
    for seq_len in (4096, 16384)
]


def lengths(mean: int, prompt: int, n: int, seq_len: int, completions: int, spread: float, seed: int) -> tuple[int, np.ndarray]:
    """Positions of a prompt, and of completions [groups, n]."""
    rng = np.random.default_rng((seed, mean, prompt, n, seq_len))
    prompt = min(prompt, seq_len // 2)
    sizes = np.exp(rng.normal(math.log(mean) - spread**2 / 2, spread, (max(1, completions // n), n)))
    return prompt, np.clip(np.rint(sizes), 1, seq_len - prompt).astype(int)


def forest_of(prompt: int, sizes: np.ndarray) -> Forest:
    groups, n = sizes.shape
    return Forest([prompt] * groups, [-1] * groups, np.repeat(np.arange(groups), n).tolist(), sizes.ravel().tolist())


def table(completions: int, spread: float, seed: int) -> None:
    print(f"{completions} completions, spread {spread}, seed {seed}; shares are unique useful tokens / (rows × seq_len)")
    print("completion prompt  n seq_len | rows bound in order | share bound in order | above bound  seconds")
    above, seconds, worse = [], 0.0, 0
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
            f"{mean:10} {prompt:6} {n:2} {seq_len:7} | {rows:4} {bound:5} {plain:8} | {useful / rows:.3f} {useful / bound:.3f} "
            f"{useful / plain:8.3f} | {100 * above[-1]:10.1f}% {took:8.3f}"
        )
    order = np.argsort(above)[::-1]
    print(f"above the bound: mean {100 * np.mean(above):.2f}%, worst {100 * max(above):.1f}%; ", end="")
    print(f"{sum(a > 0.05 for a in above)} settings above 5%, {sum(a > 0.02 for a in above)} above 2%, ", end="")
    print(f"{sum(a == 0 for a in above)} at the bound (so optimal); worse than in order: {worse}; placing took {seconds:.1f} s")
    print("farthest from it: " + "; ".join(f"{SETTINGS[i]} {100 * above[i]:.1f}%" for i in order[:5]))


def results_of(prompt: int, sizes: np.ndarray) -> list[TokenizedResult]:
    rng = np.random.default_rng(0)
    results = []
    for group, row in enumerate(sizes):
        start = rng.integers(0, 1000, prompt).tolist()
        for sample, size in enumerate(row.tolist()):
            length = prompt + size
            results.append(
                TokenizedResult(
                    task_id=str(group),
                    sample=sample,
                    token_ids=start + rng.integers(0, 1000, size).tolist(),
                    assistant_mask=[False] * prompt + [True] * size,
                    input_pos=list(range(length)),
                    logprobs=[math.nan] * prompt + [-1.0] * size,
                    prompt_length=prompt,
                    reward=0.0,
                    advantage=1.0,
                )
            )
    return results


def times(spread: float, seed: int) -> None:
    print("seconds of one core for placing 5,000, 50,000 and 200,000 completions")
    for setting in ((100, 50, 8, 16384), (1000, 200, 16, 4096), (300, 1000, 50, 16384), (4000, 50, 8, 4096)):
        took = []
        for completions in (5_000, 50_000, 200_000):
            forest = forest_of(*lengths(*setting, completions, spread, seed))
            start = time.process_time()
            place(forest, setting[-1])
            took.append(time.process_time() - start)
        print(f"{setting!s:24} " + " ".join(f"{seconds:7.2f}" for seconds in took))
    print("50,000 completions to packed tensors")
    torch.set_num_threads(1)
    for setting in ((100, 50, 8, 16384), (100, 200, 16, 4096), (300, 200, 16, 4096)):
        results = results_of(*lengths(*setting, 50_000, spread, seed))
        start = time.process_time()
        packed = packed_tensors_from_tokenized_results(results, seq_len=setting[-1], pad_id=0)
        took = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{setting!s:24} {took:7.2f} s for {packed.num_rows} rows ({peak:.1f} GiB at most, of which part is the input)")
        del results, packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    if not args.no_table:
        table(args.completions, args.spread, args.seed)
    if not args.no_times:
        times(args.spread, args.seed)


if __name__ == "__main__":
    main()

"""Output projection and loss: seconds and memory of each implementation, on one thread.

    python tools/bench_head.py [--vocabulary 32000 152000] [--ways ...] [--width 512]
        [--positions 4096] [--trained 0.4]
    python tools/bench_head.py --device cuda         # never run on a GPU yet

Forward and backward of -log p over random hidden states. Each implementation and vocabulary runs in
a process of its own. Seconds: the fastest of the rounds; with one thread on a CPU, the process's
CPU seconds, which other processes disturb less. MB: the peak of the process beyond what it held
before, excluding the gradients of weight and hidden states, which every implementation must hold in
the end. The floor is the three products that are needed at trained positions, at the speed of the
widest one, measured in the same process.
"""

import argparse
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from ttrl.training.kernels.logprobs import ReferenceHead, run_head

MB = 1e6


def full_logits(h: Tensor, labels: Tensor, weight: Tensor, trained: Tensor) -> Tensor:
    """What the predecessor did: every position, with torch's entropy."""
    logits = (h @ weight.T).float()
    torch.distributions.Categorical(logits=logits.detach()).entropy()
    return -(torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0] * trained).sum()


def trained_only(h: Tensor, labels: Tensor, weight: Tensor, trained: Tensor) -> Tensor:
    """One chunk, by autograd."""
    return (
        -torch.log_softmax((h[trained] @ weight.T).float(), -1)
        .gather(1, labels[trained][:, None])
        .sum()
    )


def recompute(h: Tensor, labels: Tensor, weight: Tensor, trained: Tensor) -> Tensor:
    return -run_head(h[trained], labels[trained], weight).logprobs_N.sum()


def entropy_and_kl(h: Tensor, labels: Tensor, weight: Tensor, trained: Tensor) -> Tensor:
    """With gradients of both."""
    reference = ReferenceHead(h[trained].detach() * 0.9, weight.detach())
    out = run_head(
        h[trained],
        labels[trained],
        weight,
        reference=reference,
        entropy_grad=True,
        divergence_grad=True,
    )
    assert out.divergence_N is not None
    return (out.divergence_N - out.logprobs_N - 0.1 * out.entropy_N).sum()


def in_forward(h: Tensor, labels: Tensor, weight: Tensor, trained: Tensor) -> Tensor:
    loss = run_head(
        h[trained], labels[trained], weight, token_loss=lambda logprobs, _: -logprobs
    ).loss
    assert loss is not None
    return loss


WAYS = {
    "full logits, entropy": (full_logits, torch.float32),
    "trained only": (trained_only, torch.float32),
    "recompute": (recompute, torch.float32),
    "recompute, entropy and KL": (entropy_and_kl, torch.float32),
    "in the forward pass": (in_forward, torch.float32),
    "in the forward pass, bf16": (in_forward, torch.bfloat16),
}


class Peak:
    """The largest resident size of this process, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.bytes = 0
        self.stopped = False
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.stopped:
            self.bytes = max(self.bytes, self.process.memory_info().rss)
            time.sleep(0.002)

    def __enter__(self) -> "Peak":
        self.before = self.process.memory_info().rss
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        self.thread.join()


def timed(run: Callable[[], object], device: str) -> float:
    clock = (
        time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    )
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(name: str, vocabulary: int, arguments: argparse.Namespace) -> str:
    """One line of the table, in this process."""
    way, dtype = WAYS[name]
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with torch.device(device):
        h = torch.randn(arguments.positions, arguments.width).to(dtype).requires_grad_()
        weight = (torch.randn(vocabulary, arguments.width) * 0.02).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary, (arguments.positions,))
        trained = torch.rand(arguments.positions) < arguments.trained
        rows = torch.randn(512, arguments.width).to(dtype)
    count = int(trained.sum())
    seconds = []
    peak = 0.0
    product = min(timed(lambda: rows @ weight.detach().T, device) for _ in range(3))
    for number in range(arguments.rounds):
        h.grad = weight.grad = None
        gc.collect()

        def run() -> None:
            way(h, labels, weight, trained).backward()

        if number == 0 and device == "cpu":
            with Peak() as watched:
                seconds.append(timed(run, device))
            peak = watched.bytes - watched.before
        else:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            seconds.append(timed(run, device))
            if device == "cuda":
                peak = torch.cuda.max_memory_allocated() - before
        product = min(product, *(timed(lambda: rows @ weight.detach().T, device) for _ in range(2)))
    assert weight.grad is not None and h.grad is not None
    gradients = weight.grad.nbytes + h.grad.nbytes
    flops = 6 * count * arguments.width * vocabulary
    rate = 2 * len(rows) * arguments.width * vocabulary / product
    return (
        f"{vocabulary:10} {name:26} {min(seconds):8.2f} {(peak - gradients) / MB:8.0f} "
        f"{flops / rate:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vocabulary", type=int, nargs="*", default=[32000, 152000])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--trained", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(measure(arguments.ways[0], arguments.vocabulary[0], arguments))
        return
    print("vocabulary way                         seconds       MB  floor s", flush=True)
    for vocabulary in arguments.vocabulary:
        for way in arguments.ways:
            if (
                way == "full logits, entropy"
                and vocabulary * arguments.positions > 4e8
                and arguments.device == "cpu"
            ):
                continue  # some 15 GB
            own = [
                "--one",
                "--ways",
                way,
                "--vocabulary",
                str(vocabulary),
                "--device",
                arguments.device,
            ]
            own += [
                item
                for name in ("width", "positions", "trained", "rounds", "threads")
                for item in (f"--{name}", str(vars(arguments)[name]))
            ]
            done = subprocess.run(
                [sys.executable, __file__, *own], stdout=subprocess.PIPE, text=True, check=False
            )
            print(
                done.stdout.strip()
                or f"{vocabulary:10} {way:26} failed with status {done.returncode}",
                flush=True,
            )


if __name__ == "__main__":
    main()

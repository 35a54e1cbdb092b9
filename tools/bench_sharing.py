"""How many tokens does prefix sharing save? A few-shot set: one prefix for all, 50 questions, 16
samples of each.

    python tools/bench_sharing.py [FILE] [--tokenizer FOLDER] [--prefix 1000] [--questions 50]
        [--samples 16] [--seq-len 4096]

FILE is GSM8K's train.jsonl (../shared/data/gsm8k/train.jsonl if it exists); without one, texts of
about the same lengths are made up. The prefix consists of worked examples, cut to exactly
`--prefix` tokens. A sample is the right answer, with its end cut off or words appended at random: a
question's samples therefore begin alike, which must save nothing, since generated tokens belong to
one sample only. Without `--tokenizer`, a token is a word, a digit, a punctuation mark or a line
end.

Printed for each way of sharing: positions stored in all rows, the same as a share of those without
sharing, rows, how full they are, the attention's query-key pairs, and seconds for the whole pack,
including its check.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ttrl.data.packing.masks import subtree_ends
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed import PackedTensors
from ttrl.records import TokenizedResult

DEFAULT_FILE = Path(__file__).resolve().parents[2] / "shared/data/gsm8k/train.jsonl"
WAYS = {"tree": "tree", "prompt": "one level", "none": "no sharing"}


def examples(file: Path | None, draw: random.Random) -> list[tuple[str, str]]:
    """Questions with their answers."""
    if file is None:
        words = [
            "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8)))
            for _ in range(3000)
        ]
        lengths = [(draw.randint(25, 80), draw.randint(40, 160)) for _ in range(400)]
        return [
            (" ".join(draw.choices(words, k=q)), " ".join(draw.choices(words, k=a)))
            for q, a in lengths
        ]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["question"], row["answer"]) for row in rows]


def tokenizer(folder: str | None) -> Callable[[str], list[int]]:
    if folder is not None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder)
        return lambda text: loaded(text, add_special_tokens=False)["input_ids"]
    numbers: dict[str, int] = {}
    pattern = re.compile(r"[A-Za-z]+|\n|\d|[^\w\s]")
    return lambda text: [
        numbers.setdefault(piece, len(numbers) + 1) for piece in pattern.findall(text)
    ]


def samples_of(args: argparse.Namespace, file: Path | None) -> list[TokenizedResult]:
    draw = random.Random(0)
    encode = tokenizer(args.tokenizer)
    texts = examples(file, draw)
    draw.shuffle(texts)
    shots: list[int] = []
    while len(shots) < args.prefix:
        question, answer = texts.pop()
        shots += encode(f"Question: {question}\nAnswer: {answer}\n\n")
    results = []
    for task, (question, answer) in enumerate(texts[: args.questions]):
        prompt = shots[: args.prefix] + encode(f"Question: {question}\nAnswer:")
        right = encode(answer)
        for number in range(args.samples):
            length = max(1, round(len(right) * math.exp(draw.gauss(0, 0.4))))
            completion = right[:length] + draw.choices(right, k=max(0, length - len(right)))
            results.append(
                TokenizedResult(
                    task_id=f"gsm8k/{task}",
                    sample=number,
                    token_ids=prompt + completion,
                    assistant_mask=[False] * len(prompt) + [True] * len(completion),
                    input_pos=list(range(len(prompt) + len(completion))),
                    logprobs=[math.nan] * len(prompt) + [-1.0] * len(completion),
                    prompt_length=len(prompt),
                    reward=0.0,
                    advantage=1.0,
                )
            )
    return results


def attended(packed: PackedTensors) -> int:
    """Query-key pairs of all rows."""
    ends = subtree_ends(packed.group_ids, packed.parent_ids)
    seen = ends - torch.arange(packed.seq_len)
    return int(seen[packed.group_ids >= 0].sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=DEFAULT_FILE if DEFAULT_FILE.exists() else None
    )
    parser.add_argument("--tokenizer")
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[4096, 16384])
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = samples_of(args, args.file)
    prompts = {one.task_id: one.prompt_length for one in results}
    generated = sum(len(one.token_ids) - one.prompt_length for one in results)
    print(
        f"{'made-up texts' if args.file is None else args.file.name}: {len(results)} samples of "
        f"{len(prompts)} questions; prefix "
        f"{args.prefix} tokens, question "
        f"{sum(prompts.values()) / len(prompts) - args.prefix:.0f}, completion "
        f"{generated / len(results):.0f} (means)"
    )
    print("seq_len  sharing    positions  of none  rows   full  pairs/1e6  seconds")
    for seq_len in args.seq_len:
        packs = {}
        for share in ("none", "prompt", "tree"):
            began = time.perf_counter()
            packed = packed_tensors_from_tokenized_results(
                results, seq_len=seq_len, pad_id=0, share=share
            )
            seconds = time.perf_counter() - began
            packs[share] = packed
            print(
                f"{seq_len:>7}  {WAYS[share]:<10} {packed.num_tokens:>9} "
                f"{packed.num_tokens / packs['none'].num_tokens:>8.1%} "
                f"{packed.num_rows:>5} {packed.num_tokens / packed.tokens.numel():>6.1%} "
                f"{attended(packed) / 1e6:>10.1f} "
                f"{seconds:>8.2f}"
            )


if __name__ == "__main__":
    main()

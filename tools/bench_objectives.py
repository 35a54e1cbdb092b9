"""Which objectives learn, and how fast? The quickstart's task under one common setting, several
seeds each.

    python tools/bench_objectives.py [--objectives ppo,cispo,...] [--seeds 0,1,2]
        [--iterations 40] [--work DIR] [--table]

The setting is that of recipes/sort_letters.py: the same warm start (one for each seed), tasks,
rewards, learning rate and number of samples and updates. Training is the recipe's own `train` with
its files; samples are drawn in this process by transformers with a KV cache, instead of a server,
from the checkpoint that the recipe wrote. 256 held-out words are answered greedily before the first
iteration and after each.

Each run adds a line to DIR/results.jsonl, and runs that are already there are not repeated:
interrupt it whenever you like. Several processes may share DIR, each with objectives of its own,
once the warm starts exist. A run of 40 iterations takes about two minutes on an idle core.

The table: iterations until 90% of the held-out words are sorted (for each seed; - if that never
happened), and after the last iteration that share, the mean reward of the held-out words (both with
95% intervals from Student's t over the seeds), and the policy's entropy per token in nats.
"""

import argparse
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ttrl import grpo_recipe, sft_recipe
from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.configs.data import AdvantageConfig
from ttrl.data.advantages import advantages_of
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.records import Sample, TaskResult
from ttrl.system.files import append_jsonl, read_jsonl, write_jsonl
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.tasks.task import Grade, Task
from ttrl.tiny_model import make_tiny_model
from ttrl.training.parallel.distributed import ranks

TASKS = 32
SAMPLES = 16
MAX_TOKENS = 12
SEQ_LEN = 512
TRAINING = {
    "lr": 1e-4,
    "updates_per_iteration": 4,
    "rows_per_microbatch": 8,
    "num_output_chunks": 1,
}

# name → (settings of the recipe, kind of advantages, aggregation); "REFERENCE" stands for the warm
# start's folder
REFERENCE = {"reference_model": "REFERENCE"}
OBJECTIVES: dict[str, tuple[dict[str, Any], str, str]] = {
    "ppo": ({}, "std", "token"),
    "ppo-clip-higher": ({"clip_high": 0.28}, "std", "token"),
    "ppo-dual-clip": ({"dual_clip": 3.0}, "std", "token"),
    "reinforce": ({"objective": "reinforce"}, "std", "token"),
    "rloo": ({"objective": "reinforce"}, "leave_one_out", "token"),
    "dr-grpo": ({}, "mean", "constant"),
    "sequence-mean": ({}, "std", "sequence"),
    "tanh": ({"objective": "tanh"}, "std", "token"),
    "gspo": ({"objective": "gspo", "clip_low": 0.2, "clip_high": 0.2}, "std", "sequence"),
    "gspo-tight": ({"objective": "gspo", "clip_low": 0.02, "clip_high": 0.03}, "std", "sequence"),
    "cispo": ({"objective": "cispo", "clip_low": 1.0}, "std", "token"),
    "clip-cov": (
        {"objective": "clip_cov", "covariance_share": 0.02, "covariance_bounds": [0.2, 5.0]},
        "std",
        "token",
    ),
    "kl-cov": ({"objective": "kl_cov", "covariance_share": 0.02}, "std", "token"),
    "kl-k1": ({"kl_coefficient": 0.02, "kl_estimator": "k1", **REFERENCE}, "std", "token"),
    "kl-k2": ({"kl_coefficient": 0.02, "kl_estimator": "k2", **REFERENCE}, "std", "token"),
    "kl-k3": ({"kl_coefficient": 0.02, "kl_estimator": "k3", **REFERENCE}, "std", "token"),
    "kl-full": ({"kl_coefficient": 0.02, "kl_estimator": "full", **REFERENCE}, "std", "token"),
    "kl-in-reward": (
        {"kl_coefficient": 0.02, "kl_estimator": "k1", "kl_in": "reward", **REFERENCE},
        "std",
        "token",
    ),
    "entropy-bonus": ({"entropy_coefficient": 0.005}, "std", "token"),
    "tis-token": ({"off_policy": "token"}, "std", "token"),
    "tis-sequence": ({"off_policy": "sequence"}, "std", "token"),
    "masked": ({"off_policy": "mask", "off_policy_cap": 5.0}, "std", "token"),
    "implicit": ({"token_rewards": "implicit", **REFERENCE}, "std", "token"),
    "value-head": ({"value_head": True, "value_lr": 1e-3, "lam": 0.95}, "std", "token"),
}
MAIN = "ppo,reinforce,tanh,gspo,cispo,clip-cov,kl-cov,implicit,value-head"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--objectives", default=MAIN, help="comma-separated names, or all; default: %(default)s"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/objectives"),
        help="results, warm starts and the newest checkpoint",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the existing results"
    )
    chosen = parser.parse_args()
    chosen.objectives = (
        list(OBJECTIVES) if chosen.objectives == "all" else chosen.objectives.split(",")
    )
    chosen.seeds = [int(seed) for seed in chosen.seeds.split(",")]
    if unknown := set(chosen.objectives) - set(OBJECTIVES):
        parser.error(f"unknown objectives {sorted(unknown)}; known: {', '.join(OBJECTIVES)}")
    return chosen


def warm_start(folder: Path, seed: int, threads: int) -> Path:
    """The quickstart's: random weights, then 160 supervised steps on words of 3 to 5 letters."""
    if not (folder / "checkpoint" / "config.json").exists():
        steps = 160
        batch = 64
        model = make_tiny_model(folder / "random_model", seed=seed)
        write_jsonl(
            folder / "examples.jsonl", sort_letters_examples(steps * batch, seed=seed, max_length=5)
        )
        values = {
            "model": str(model),
            "data": str(folder / "examples.jsonl"),
            "output_dir": str(folder),
            "steps": steps,
        }
        values |= {
            "batch_size": batch,
            "seq_len": 128,
            "lr": 1e-3,
            "seed": seed,
            "rows_per_microbatch": 64,
        }
        config = SFTConfig.parse(
            values | {"num_output_chunks": 1, "num_threads": threads, "device": "cpu"}, "warm start"
        )
        with ranks(config) as here:
            sft_recipe.train_on_examples(config, here)
    return folder / "checkpoint"


class Sampler:
    """Draws completions from a model folder. Shapes: B prompts, S = B·n samples, T tokens of the
    longest prompt, V vocabulary.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def sample(
        self,
        tasks: list[Task],
        n: int,
        temperature: float,
        generator: torch.Generator,
        version: int,
    ) -> list[TaskResult]:
        """n graded samples of each task; temperature 0 takes the likeliest token."""
        prompts = [
            self.tokenizer.apply_chat_template(
                task.messages, add_generation_prompt=True, return_dict=False
            )
            for task in tasks
        ]
        ids, logprobs = self._complete(prompts, n, temperature, generator)
        results = []
        for number, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
            group = []
            for sample in range(n):
                completion = ids[number * n + sample]
                text = self.tokenizer.decode(completion, skip_special_tokens=True)
                grade = Grade.of(
                    task.grader(SimpleNamespace(message=SimpleNamespace(content=text))), task.id
                )
                group.append(
                    Sample(
                        task_id=task.id,
                        sample=sample,
                        messages=task.messages,
                        text=text,
                        prompt_token_ids=prompt,
                        token_ids=completion,
                        logprobs=logprobs[number * n + sample],
                        finish_reason="stop"
                        if completion[-1] == self.tokenizer.eos_token_id
                        else "length",
                        reward=grade.reward,
                        metrics=grade.metrics,
                        weights_version=version,
                    )
                )
            results.append(TaskResult(task_id=task.id, messages=task.messages, samples=group))
        return results

    @torch.inference_mode()
    def _complete(
        self, prompts: list[list[int]], n: int, temperature: float, generator: torch.Generator
    ) -> tuple[list[list[int]], list[list[float]]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        tokens_BT = torch.tensor(
            [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        )
        mask_BT = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        out = self.model(
            tokens_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        cache.batch_repeat_interleave(n)
        logits_SV = out.logits[:, -1].repeat_interleave(n, dim=0)
        mask_ST, positions_S = (
            t.repeat_interleave(n, dim=0) for t in (mask_BT, positions_BT[:, -1])
        )
        chosen = []
        logprobs = []
        while True:
            next_S, logprobs_S = _draw(logits_SV.float(), temperature, generator)
            chosen.append(next_S)
            logprobs.append(logprobs_S)
            ended_S = (torch.stack(chosen) == self.tokenizer.eos_token_id).any(0)
            if len(chosen) == MAX_TOKENS or ended_S.all():
                break
            mask_ST = torch.cat([mask_ST, torch.ones(len(mask_ST), 1, dtype=torch.int64)], dim=1)
            positions_S = positions_S + 1
            logits_SV = self.model(
                next_S[:, None],
                attention_mask=mask_ST,
                position_ids=positions_S[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        ids = torch.stack(chosen, 1).tolist()
        known = torch.stack(logprobs, 1).tolist()
        eos = self.tokenizer.eos_token_id
        ends = [row.index(eos) + 1 if eos in row else len(row) for row in ids]
        return [row[:end] for row, end in zip(ids, ends, strict=True)], [
            row[:end] for row, end in zip(known, ends, strict=True)
        ]


def _draw(
    logits_SV: Tensor, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens [S] and their log-probabilities [S] under what they were drawn from."""
    all_SV = torch.log_softmax(logits_SV / (temperature or 1.0), dim=-1)
    next_S = (
        torch.multinomial(all_SV.exp(), 1, generator=generator).squeeze(1)
        if temperature
        else all_SV.argmax(-1)
    )
    return next_S, all_SV.gather(1, next_S[:, None]).squeeze(1)


def validate(sampler: Sampler, tasks: list[Task]) -> dict[str, float]:
    samples = [result.samples[0] for result in sampler.sample(tasks, 1, 0.0, torch.Generator(), 0)]
    return {
        "exact": sum(sample.metrics["exact"] for sample in samples) / len(samples),
        "reward": sum(sample.reward or 0.0 for sample in samples) / len(samples),
    }


def run(name: str, seed: int, iterations: int, work: Path, threads: int) -> dict[str, Any]:
    """One run from the warm start; what is known after each iteration."""
    settings, kind, aggregation = OBJECTIVES[name]
    began = time.perf_counter()
    reference = warm_start(work / f"warm_start_{seed}", seed, threads)
    model = reference
    state = None
    tasks = get_sort_letters_tasks("train", n=TASKS * iterations, seed=seed, length_exponent=2)
    held_out = get_sort_letters_tasks("validation", n=256)
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(model)
    rows = [validate(sampler, held_out)]
    for iteration in range(1, iterations + 1):
        chosen = tasks[(iteration - 1) * TASKS : iteration * TASKS]
        results = sampler.sample(chosen, SAMPLES, 1.0, generator, iteration - 1)
        advantages = advantages_of(results, AdvantageConfig(kind=kind))  # type: ignore[arg-type]
        tokenize = TaskResultTokenizer()
        tokenized = [
            one
            for group, values in zip(advantages.kept, advantages.values, strict=True)
            for one in tokenize(group, values)
        ]
        # The one before is still being read.
        folder = work / f"newest_{name}_{seed}" / str(iteration % 2)
        folder.mkdir(parents=True, exist_ok=True)
        packed = packed_tensors_from_tokenized_results(
            tokenized,
            seq_len=SEQ_LEN,
            pad_id=sampler.tokenizer.pad_token_id,
            aggregation=aggregation,  # type: ignore[arg-type]
            constant_length=MAX_TOKENS if aggregation == "constant" else None,
        )
        packed.save(folder / "packed.safetensors")
        (folder / "train.jsonl").unlink(missing_ok=True)
        values = {
            key: str(reference) if value == "REFERENCE" else value
            for key, value in settings.items()
        }
        values |= {
            "model": str(model),
            "packed": str(folder / "packed.safetensors"),
            "output_dir": str(folder),
            "state": state,
        }
        values |= {"iteration": iteration, "seed": seed, "num_threads": threads, "device": "cpu"}
        config = GRPOConfig.parse(TRAINING | values, name)
        with ranks(config) as here:
            grpo_recipe.train_iteration(config, here)
        steps = read_jsonl(folder / "train.jsonl")
        model = folder / "checkpoint"
        state = str(folder / "state")
        sampler = Sampler(model)
        rows.append(validate(sampler, held_out) | _means(steps))
        rows[-1]["sampled_reward"] = sum(sum(r.rewards) for r in results) / (TASKS * SAMPLES)
    return {
        "objective": name,
        "seed": seed,
        "iterations": rows,
        "seconds": time.perf_counter() - began,
    }


def _means(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Over the optimizer steps of an iteration, of what every recipe log has."""
    names = [
        name
        for name in ("entropy", "grad_norm", "clip_fraction_low", "clip_fraction_high", "kl")
        if name in steps[0]
    ]
    return {name: sum(step[name] for step in steps) / len(steps) for name in names}


def interval(values: list[float]) -> str:
    """Mean ± half of the 95% interval of the mean (Student's t)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.3f}        "
    quantile = {
        2: 12.71,
        3: 4.30,
        4: 3.18,
        5: 2.78,
        6: 2.57,
        7: 2.45,
        8: 2.36,
        9: 2.31,
        10: 2.26,
    }.get(len(values), 2.0)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:.3f} ± {quantile * deviation / math.sqrt(len(values)):.3f}"


def table(results: list[dict[str, Any]], iterations: int) -> None:
    print(
        f"{TASKS} × {SAMPLES} samples an iteration, {TRAINING['updates_per_iteration']} updates, "
        f"lr {TRAINING['lr']}"
    )
    print(
        f"{'':16} {'to 0.9':>12} | {'exact, end':^15} | {'reward, end':^15} | entropy | s/iteration"
    )
    for name in OBJECTIVES:
        runs = [
            one
            for one in results
            if one["objective"] == name and len(one["iterations"]) == iterations + 1
        ]
        if not runs:
            continue
        runs.sort(key=lambda one: one["seed"])
        reached = [
            next((n for n, row in enumerate(one["iterations"]) if row["exact"] >= 0.9), None)
            for one in runs
        ]
        ends = [one["iterations"][-1] for one in runs]
        print(
            f"{name:16} {' '.join('-' if n is None else str(n) for n in reached):>12} | "
            f"{interval([e['exact'] for e in ends])} | "
            f"{interval([e['reward'] for e in ends])} | "
            f"{sum(e['entropy'] for e in ends) / len(ends):7.3f} | "
            f"{sum(one['seconds'] for one in runs) / len(runs) / iterations:.2f}"
        )


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    disable_progress_bar()
    file = chosen.work / "results.jsonl"
    for seed in [] if chosen.table else chosen.seeds:
        for name in chosen.objectives:
            there = read_jsonl(file) if file.exists() else []
            if any(
                (r["objective"], r["seed"], len(r["iterations"]))
                == (name, seed, chosen.iterations + 1)
                for r in there
            ):
                continue
            result = run(name, seed, chosen.iterations, chosen.work, chosen.threads)
            append_jsonl(file, result)
            exact = " ".join(f"{row['exact']:.2f}" for row in result["iterations"])
            print(f"{name}, seed {seed}, {result['seconds']:.0f} s: {exact}", flush=True)
    table(read_jsonl(file) if file.exists() else [], chosen.iterations)


if __name__ == "__main__":
    main()

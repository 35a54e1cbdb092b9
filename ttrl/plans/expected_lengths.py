"""Find the prompt and completion lengths of an iteration: known from a run, counted in tasks, or
assumed.

A group holds the tokens of a task's prompt and the lengths of its completions. The trainer's rows
store common parts of prompts once. Assumed lengths are lognormal, cut off at `max_tokens`: model
answers are skewed to the right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ttrl.configs.run import TrainConfig
from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import UserError
from ttrl.records import Sample, TokenizedResult, raw_prompt, tokens_before
from ttrl.system.files import read_jsonl
from ttrl.tasks.task import Task

PROMPT_TOKENS = 200
"""Assumed if there are no tasks."""
_COMPLETION_SHARE = 1 / 3  # of max_tokens; assumed
_PROMPT_SIGMA, _COMPLETION_SIGMA = 0.3, 0.6  # of the lognormal distributions
# Most made-up tokens; larger iterations are planned from a part of their groups.
_MOST_TOKENS = 2_000_000
_RUN_ITERATIONS = 3  # the newest of a run


@dataclass(frozen=True)
class Assumptions:
    """Hold values for unknown lengths; None: a default."""

    prompt_tokens: float | None = None
    """Mean length of prompts."""
    completion_tokens: float | None = None
    """Mean length of completions."""
    signal_share: float | None = None
    """Share of the groups with differing rewards, and so trained on; None: all."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
            if value is not None and value > _MOST_TOKENS:
                raise UserError(f"{name} is {value:g}; it must be at most {_MOST_TOKENS:,}")
        if self.signal_share is not None and not 0 < self.signal_share <= 1:
            raise UserError(
                f"signal_share is {self.signal_share}; it must be above 0 and at most 1"
            )


@dataclass(frozen=True)
class PlannedGroup:
    """Hold a prompt's token ids and the lengths of its completions in tokens."""

    prompt: Sequence[int]
    completions: list[int]


@dataclass(frozen=True)
class IterationLengths:
    """Hold the groups of an iteration, or of a part of it."""

    groups: list[PlannedGroup]
    scale: float
    """Size of the iteration, as a multiple of these groups."""
    prompts_from: str
    completions_from: str
    """Source of the lengths: "assumed", "tasks", "probe", or "run"."""
    signal_share: float = 1.0
    """Share of the groups used in training."""
    signal_from: str = "assumed"


def assumed_lengths(
    config: TrainConfig, assumptions: Assumptions, vocabulary: int
) -> IterationLengths:
    """Assume a run's lengths from its config."""
    draw = np.random.default_rng(config.seed)
    mean = PROMPT_TOKENS if assumptions.prompt_tokens is None else assumptions.prompt_tokens
    count = _planned(config, mean + config.samples_per_task * completion_mean(config, assumptions))
    prompts: list[Any] = [
        draw.integers(0, vocabulary, length)
        for length in lognormal(draw, mean, _PROMPT_SIGMA, count)
    ]
    return _with_completions(config, assumptions, draw, prompts, "assumed")


def task_lengths(
    config: TrainConfig, assumptions: Assumptions, tasks: Sequence[Task], tokenizer: Any
) -> IterationLengths:
    """Count the prompt tokens of an iteration's tasks under the model's chat template; assume the
    completions.
    """
    draw = np.random.default_rng(config.seed)
    some = draw.choice(len(tasks), min(len(tasks), config.tasks_per_iteration), replace=False)
    chosen = [tasks[number] for number in some]
    first = prompt_ids(chosen[0], tokenizer)
    count = _planned(
        config, len(first) + config.samples_per_task * completion_mean(config, assumptions)
    )
    prompts = [first, *(prompt_ids(task, tokenizer) for task in chosen[1:count])]
    return _with_completions(config, assumptions, draw, prompts, "tasks")


def prompt_ids(task: Task, tokenizer: Any) -> list[int]:
    """Return a task's messages as tokens. Raises UserError if the chat template refuses them."""
    prompt = raw_prompt(task.messages)
    if prompt is not None:
        if isinstance(prompt, list):
            return prompt
        return text_prompt_ids(prompt, tokenizer)
    try:
        template = ChatTemplate(tokenizer)
        text = template.render(template.prepared(task.messages), answer_next=True)
    except UserError as error:
        where = f"task {task.id!r}: the model's chat template cannot render its messages"
        raise UserError(f"{where} ({error})") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompts_beyond(tasks: Sequence[Task], context: int, model: Path) -> list[tuple[Task, int]]:
    """Return the tasks whose prompts leave no room for an answer, each with its number of tokens,
    longest text first. Without a tokenizer in the model's folder, and for tasks with a rollout of
    their own, nothing is known.
    """
    sizes = {task.id: len(task.as_json()) for task in tasks if task.rollout is None}
    # A token has a byte or more, so few tasks or none need the tokenizer.
    long = [task for task in tasks if sizes.get(task.id, 0) >= context]
    if not long:
        return []
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return []
    found = []
    for task in sorted(long, key=lambda task: sizes[task.id], reverse=True):
        try:
            count = len(prompt_ids(task, tokenizer))
        except UserError:
            continue  # the server says more about a template's refusal
        if count >= context:
            found.append((task, count))
        elif count < context / 2:
            break  # no shorter text has twice as many tokens
    return found


def text_prompt_ids(prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a raw prompt, without a chat template, as sent to a server. They begin
    with the tokenizer's special tokens (`<bos>`) once, even if the text already contains them.
    """
    plain = list(tokenizer.encode(prompt, add_special_tokens=False))
    marked = list(tokenizer.encode(prompt))
    added = tokens_before(marked, plain)
    brings_them = bool(added) and plain[: len(added)] == added
    if brings_them:
        return plain
    return marked


def at_their_longest(config: TrainConfig, lengths: IterationLengths) -> IterationLengths:
    """Return the same groups, all trained on, with completions of `max_tokens` if a row has room.
    Memory is planned for these: a model with 16-token answers may write longer ones later.
    """
    groups = []
    for group in lengths.groups:
        longest = min(config.max_tokens, config.seq_len - len(group.prompt))
        groups.append(
            replace(group, completions=[max(length, longest) for length in group.completions])
        )
    return replace(lengths, groups=groups, signal_share=1.0)


def run_lengths(iterations: Sequence[Path], signal_share: float | None) -> IterationLengths | None:
    """Return the lengths sampled in the newest of a run's iteration folders; None without rollouts.
    In samples of several turns, the text between turns counts as completion.
    """
    there = [path for path in iterations if (path / "rollouts.jsonl").is_file()][-_RUN_ITERATIONS:]
    groups: list[PlannedGroup] = []
    for path in there:
        by_task: dict[str, PlannedGroup] = {}
        for row in read_jsonl(path / "rollouts.jsonl"):
            sample = Sample.from_json(row)
            prompt, completion = _ids(sample)
            if prompt is not None and completion:
                by_task.setdefault(sample.task_id, PlannedGroup(prompt, [])).completions.append(
                    completion
                )
        groups += by_task.values()
    if not groups:
        return None
    lengths = IterationLengths(groups, 1 / len(there), "run", "run")
    if signal_share is None:
        return lengths
    return replace(lengths, signal_share=signal_share, signal_from="run")


def _ids(sample: Sample) -> tuple[list[int] | None, int]:
    """Return a sample's prompt, and the number of tokens after it."""
    if sample.turns:
        prompt = sample.turns[0].prompt_token_ids
        total = sum(len(turn.prompt_token_ids or ()) + turn.num_tokens for turn in sample.turns)
        return prompt, total - len(prompt or ())
    return sample.prompt_token_ids, len(sample.token_ids or ())


def completion_mean(config: TrainConfig, assumptions: Assumptions) -> float:
    """Return the mean length of completions in tokens, before any cut."""
    given = assumptions.completion_tokens
    if given is None:
        return max(1.0, config.max_tokens * _COMPLETION_SHARE)
    return given


def lognormal(draw: np.random.Generator, mean: float, sigma: float, count: int) -> list[int]:
    """Draw lengths with this mean, at least 1."""
    return [max(1, round(x)) for x in draw.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)]


def _planned(config: TrainConfig, tokens_of_group: float) -> int:
    """Return the number of groups in the plan."""
    return max(1, min(config.tasks_per_iteration, int(_MOST_TOKENS / tokens_of_group)))


def _with_completions(
    config: TrainConfig,
    assumptions: Assumptions,
    draw: np.random.Generator,
    prompts: Sequence[Sequence[int]],
    source: str,
) -> IterationLengths:
    n = config.samples_per_task
    mean = completion_mean(config, assumptions)
    drawn = [
        min(length, config.max_tokens)
        for length in lognormal(draw, mean, _COMPLETION_SIGMA, n * len(prompts))
    ]
    groups = [PlannedGroup(prompt, drawn[n * k : n * (k + 1)]) for k, prompt in enumerate(prompts)]
    share = assumptions.signal_share or 1.0
    return IterationLengths(
        groups, config.tasks_per_iteration / len(groups), source, "assumed", share
    )


def made_up_samples(lengths: IterationLengths, vocabulary: int, seed: int) -> list[TokenizedResult]:
    """Return the trainer's input for the groups with signal: the prompts, with random tokens as
    completions.
    """
    draw = np.random.default_rng(seed)
    kept = max(1, round(lengths.signal_share * len(lengths.groups)))
    samples = []
    for number, group in enumerate(lengths.groups[:kept]):
        prompt = np.asarray(group.prompt, dtype=np.int64)
        for k, length in enumerate(group.completions):
            ids = np.concatenate([prompt, draw.integers(0, vocabulary, length)])
            mask: Any = np.arange(len(ids)) >= len(prompt)
            logprobs: Any = np.full(len(ids), np.nan, dtype=np.float32)
            logprobs[len(prompt) :] = -1.0
            samples.append(
                TokenizedResult(
                    task_id=str(number),
                    sample=k,
                    token_ids=ids,
                    assistant_mask=mask,
                    input_pos=range(len(ids)),
                    logprobs=logprobs,
                    prompt_length=len(prompt),
                    reward=0.0,
                    advantage=(-1.0) ** k,
                    weights_version=0,
                )
            )
    return samples

"""Count signs of learning in an iteration's rollouts: endings, failures, repetitions, lengths. Done
once, while packing.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from ttrl.facts import RolloutFigures, ratio
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.client.assembly import STOPPED_EARLY


def rollout_figures(groups: Sequence[TaskResult], *, stops_early: bool = False) -> RolloutFigures:
    """Return counts and shares over the groups of one iteration. stops_early: whether the run has
    an `early_stop`.
    """
    samples = [sample for group in groups for sample in group.samples]
    completed = [sample for sample in samples if sample.finish_reason is not None]
    lengths = [_length(sample) for sample in completed]
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for sample in completed:
        if sample.reward is not None and sample.finish_reason != STOPPED_EARLY:
            rewards[sample.finish_reason == "length"].append(sample.reward)
    stopped = sum(sample.finish_reason == STOPPED_EARLY for sample in completed)
    compared = [
        [sample for sample in group.samples if sample.reward is not None] for group in groups
    ]
    compared = [group for group in compared if len(group) > 1]
    keys = [[_key(sample) for sample in group] for group in compared]
    graded = sum(map(len, keys))
    distinct = sum(len(set(group)) for group in keys)
    commonest, times = (
        Counter(key for group in keys for key in group).most_common(1)[0] if graded else (None, 0)
    )
    highest = max((sample.reward or 0.0 for group in compared for sample in group), default=0.0)
    same = [group for group, texts in zip(compared, keys, strict=True) if len(set(texts)) == 1]
    stuck = sum(max(sample.reward or 0.0 for sample in group) < highest for group in same)
    return RolloutFigures(
        truncated=ratio(
            sum(sample.finish_reason == "length" for sample in completed), len(completed)
        ),
        truncated_reward=_mean(rewards[True]),
        ended_reward=_mean(rewards[False]),
        stopped_early=ratio(stopped, len(completed)) if stops_early else None,
        empty=ratio(sum(length == 0 for length in lengths), len(completed)),
        grader_failures=sum((sample.error or "").startswith("GraderError") for sample in samples),
        repeated=ratio(graded - distinct, graded),
        repeated_groups=ratio(len(same), len(keys)),
        stuck_groups=ratio(stuck, len(keys)),
        commonest=ratio(times, graded),
        commonest_tasks=ratio(sum(commonest in group for group in keys), len(keys)),
        length_correlation=_within_groups(compared),
        mean_length=_mean(lengths),
        max_length=max(lengths, default=None),
    )


def sampled_reads(
    groups: Sequence[TaskResult], carried: Sequence[TaskResult] = (), *, shared: bool = False
) -> list[tuple[int, int, int]]:
    """Return (prompt tokens, prompt tokens not computed by the server, generated tokens) of each
    answer from a server, for `ttrl.costs.flops.sampling_flops`. carried: the first groups' earlier
    state, continued here.

    For samples of one request, the server reports the prefix cache's share of the prompt only once,
    for the last to finish. So the first of a group counts as reading the whole prompt, and the
    others as reading the uncached part; with `shared`, nothing, as our servers on CPUs compute such
    prompts once (`ttrl.vllm_worker.shared_prompts`). If samples of a group were requested one by
    one, each has its own count. Not seen: tokens of failed requests, canaries, and tokens vLLM
    computed again after running out of cache.
    """
    reads = []
    for place, group in enumerate(groups):
        if place < len(carried):
            before = carried[place].samples
        else:
            before = []
        fresh: list[tuple[int, int, int]] = []
        for number, sample in enumerate(group.samples):
            if number < len(before):
                had = len(before[number].token_ids or ())
            else:
                had = 0
            new = len(sample.token_ids or ()) - had
            known = sample.prefix_cached or 0
            if sample.turns:
                reads += _turn_reads(sample)
            elif not sample.cached and new > 0:
                (reads if had else fresh).append(
                    (len(sample.prompt_token_ids or ()) + had, known, new)
                )
        if len(fresh) > 1 and len({known for _, known, _ in fresh}) == 1:
            fresh = [
                (prompt, 0 if not k else prompt if shared else known, n)
                for k, (prompt, known, n) in enumerate(fresh)
            ]
        reads += fresh
    return reads


def _turn_reads(sample: Sample) -> list[tuple[int, int, int]]:
    reads: list[tuple[int, int, int]] = []
    lengths: list[int] = []  # of each turn's prompt and reply
    for turn in sample.turns or ():
        prompt = len(turn.prompt_token_ids or ()) + (
            0 if turn.continues is None else lengths[turn.continues]
        )
        lengths.append(prompt + turn.num_tokens)
        if not turn.cached and turn.num_tokens:
            reads.append((prompt, turn.prefix_cached or 0, turn.num_tokens))
    return reads


def _key(sample: Sample) -> Hashable:
    if sample.token_ids is not None:
        return tuple(sample.token_ids)
    return sample.text


def _length(sample: Sample) -> int:
    if sample.token_ids is not None:
        return len(sample.token_ids)
    return len(sample.text)


def _mean(values: Sequence[float]) -> float | None:
    if values:
        return math.fsum(values) / len(values)
    return None


def _within_groups(groups: Sequence[Sequence[Sample]]) -> float | None:
    """Return Pearson's correlation of reward and length, after subtracting each group's means."""
    rewards = []
    lengths = []
    for group in groups:
        values = [sample.reward or 0.0 for sample in group]
        sizes = [float(_length(sample)) for sample in group]
        rewards += [value - math.fsum(values) / len(values) for value in values]
        lengths += [size - math.fsum(sizes) / len(sizes) for size in sizes]
    spread = math.sqrt(math.fsum(r * r for r in rewards) * math.fsum(s * s for s in lengths))
    if spread < 1e-12:
        return None
    return math.fsum(r * s for r, s in zip(rewards, lengths, strict=True)) / spread

"""Measure a policy's entropy on answers of a pack, under any parameters, without sampling again.

Shapes: S sequences of the batch, T labels of the longest of a microbatch.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import IGNORE_LABEL, PackedTensors
from ttrl.errors import RunFolderError
from ttrl.instruments.entropy import (
    Mean,
    by_sequence,
    entropy_by_position,
    entropy_estimates,
    importance_entropy,
    mean_over,
    others_mean,
)
from ttrl.instruments.linear_response import Vector
from ttrl.training.batches import policy_inputs, sample_keys, updates
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import HeadOptions, Policy


def halves(packed: PackedTensors, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Deal the samples of each task to two halves at random, by their numbers in the table; the
    second gets the odd one.
    """
    tasks: dict[str, list[int]] = {}
    for number, one in enumerate(packed.samples):
        tasks.setdefault(one.task_id, []).append(number)
    first: list[int] = []
    second: list[int] = []
    for numbers in tasks.values():
        mixed = [
            numbers[place] for place in torch.randperm(len(numbers), generator=generator).tolist()
        ]
        first += mixed[: len(mixed) // 2]
        second += mixed[len(mixed) // 2 :]
    return first, second


def draw(
    packed: PackedTensors, among: Sequence[int], count: int, generator: torch.Generator
) -> Counter[int]:
    """Draw `count` samples: tasks uniformly with replacement, and one sample in `among` of each.
    Returns the number of draws of each sample.
    """
    tasks: dict[str, list[int]] = {}
    for number in among:
        tasks.setdefault(packed.samples[number].task_id, []).append(number)
    if not tasks:
        raise RunFolderError(
            "no task of the pack has two samples, one for the update and one to measure its "
            "effect on"
        )
    groups = list(tasks.values())
    times: Counter[int] = Counter()
    for place in torch.randint(len(groups), (count,), generator=generator).tolist():
        group = groups[place]
        times[group[int(torch.randint(len(group), (), generator=generator))]] += 1
    return times


def only(packed: PackedTensors, samples: Sequence[int]) -> PackedTensors:
    """Return the pack with only the labels of these samples, by their numbers in the table."""
    others = ~torch.isin(packed.sample_ids, torch.tensor(list(samples), dtype=torch.int64))
    changed = {"labels": IGNORE_LABEL, "weights": 0.0, "advantages": 0.0}
    return dataclasses.replace(
        packed,
        **{name: getattr(packed, name).masked_fill(others, v) for name, v in changed.items()},
    )


class EntropyBatch:
    """Measure the entropy on drawn answers under any parameters. `times`: by number in the pack's
    table.
    """

    def __init__(
        self,
        policy: Policy,
        packed: PackedTensors,
        times: Mapping[int, int],
        config: GRPOConfig,
        here: Ranks,
    ) -> None:
        self._policy = policy
        self.device = here.device
        full = {id(p): name for name, p in policy.named_parameters()}
        self._full_names = {name: full[id(p)] for name, p in policy.parameters_by_name().items()}
        chosen = only(packed, list(times))
        (step,) = updates(chosen, 1, (0, 0), here, policy.decoder.config)
        self._batches = list(step.microbatches(config, here.device))
        drawn = sample_keys([packed.samples[number] for number in times])
        counted = dict(zip(map(tuple, drawn.tolist()), times.values(), strict=True))
        # Of the samples with labels, in the order of `by_sequence`.
        owned = [
            (one["sample_keys"], torch.unique(one["sample_ids"].flatten()[one["trained"]]))
            for one in self._batches
        ]
        keys = torch.cat([keys[samples] for keys, samples in owned])
        self.times = torch.tensor(
            [counted[tuple(key)] for key in keys.tolist()], device=here.device
        )
        self._tasks = keys[:, 0]
        with torch.no_grad():
            seen = list(self._tables(None))
        self._start = [logprobs for logprobs, _ in seen]
        entropies = pad_sequence(
            [row for _, entropies in seen for row in entropies], batch_first=True
        )
        baseline = others_mean(entropies, self.times)
        self.by_position = entropy_by_position(entropies, self.times)
        parts = baseline.split([len(logprobs) for logprobs in self._start])
        self._baselines = [
            part[:, : start.shape[1]] for part, start in zip(parts, self._start, strict=True)
        ]
        estimates = [entropy_estimates(*pair) for pair in seen]
        self.entropies = tuple(
            self.mean(torch.cat([one[which] for one in estimates])) for which in (0, 1)
        )

    def mean(self, values_S: Tensor) -> Mean:
        """Return the mean over draws, with its error over prompts."""
        return mean_over(
            values_S.repeat_interleave(self.times), self._tasks.repeat_interleave(self.times)
        )

    @torch.no_grad()
    def values(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return J [S] and log w [S] under other parameters; the mean of J is an unbiased estimate
        of their entropy.
        """
        parts = [
            importance_entropy(*tables, start, baseline)
            for tables, start, baseline in zip(
                self._tables(parameters), self._start, self._baselines, strict=True
            )
        ]
        return torch.cat([values for values, _ in parts]), torch.cat([log_w for _, log_w in parts])

    def gradient(self, parameters: Mapping[str, Tensor]) -> Vector:
        """Return an unbiased estimate of ∇H at `parameters`."""
        owners = self._policy.parameters_by_name()
        total = int(self.times.sum())
        done = 0
        self._policy.zero_grad()
        with _standing_at(owners, parameters):
            tables = self._tables(None, grad=True)
            for pair, start, baseline in zip(tables, self._start, self._baselines, strict=True):
                values, _ = importance_entropy(*pair, start, baseline)
                times = self.times[done : done + len(values)]
                ((values * times).sum() / total).backward()
                done += len(values)
        gradients = {}
        for name, value in parameters.items():
            found = owners[name].grad
            gradients[name] = torch.zeros_like(value) if found is None else found
        self._policy.zero_grad()
        return gradients

    def _tables(
        self, parameters: Mapping[str, Tensor] | None, grad: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-probabilities and entropies [S, T] of each microbatch."""
        named = {self._full_names[name]: value for name, value in (parameters or {}).items()}
        for batch in self._batches:
            options = HeadOptions(trained=batch["trained"], entropy_grad=grad)
            out = functional_call(
                self._policy, named, (*policy_inputs(batch), options, batch.get("experts"))
            )
            samples = batch["sample_ids"].flatten()[batch["trained"]]
            yield by_sequence(out.logprobs, samples)[0], by_sequence(out.entropy, samples)[0]


@contextlib.contextmanager
def _standing_at(
    owners: Mapping[str, nn.Parameter],
    values: Mapping[str, Tensor],
) -> Iterator[None]:
    """Let parameters hold other values inside the block. Unlike `functional_call`, this covers the
    backward pass and its recomputation of checkpointed layers.
    """
    before = {name: owners[name].data for name in values}
    for name, value in values.items():
        owners[name].data = value
    try:
        yield
    finally:
        for name, own in before.items():
            owners[name].data = own

"""Measure a policy's entropy on answers of a pack, under any parameters, without sampling again.

The answers are drawn from the pack of the update (`halves`, `draw`), or sampled from a held-out set
(`ttrl.instruments.held_out`). `alone` takes one of them out of its row, for gradients of its own.

Shapes: S sequences of the batch, T labels of the longest of a microbatch.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import IGNORE_LABEL, PackedTensors
from ttrl.data.packing.packed import normaliser
from ttrl.data.packing.packed_format import PackedSample
from ttrl.errors import RunFolderError
from ttrl.instruments.entropy import (
    Mean,
    by_sequence,
    effective_size,
    entropy_by_position,
    entropy_estimates,
    importance_entropy,
    mean_over,
    others_mean,
)
from ttrl.instruments.linear_response import Vector
from ttrl.training.batches import Update as Step
from ttrl.training.batches import policy_inputs, sample_keys
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import HeadOptions, Policy, PolicyOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
Clock = Callable[[], float]
"""Returns seconds that never go back."""
_SAID_EVERY = 10.0


def counted_off(items: Sequence[T], what: str, clock: Clock = time.monotonic) -> Iterator[T]:
    """Yield the items of a long loop, and say every few seconds how many of how many are done."""
    said = clock()
    for done, item in enumerate(items):
        if clock() - said >= _SAID_EVERY:
            logger.info("%s: %d of %d done", what, done, len(items))
            said = clock()
        yield item


def by_task(
    samples: Sequence[PackedSample], numbers: Iterable[int] | None = None
) -> list[list[int]]:
    """Return the numbers of samples in a table, by task. numbers: of some samples; None: of all."""
    tasks: dict[str, list[int]] = {}
    for number in range(len(samples)) if numbers is None else numbers:
        tasks.setdefault(samples[number].task_id, []).append(number)
    return list(tasks.values())


def halves(packed: PackedTensors, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Deal the samples of each task to two halves at random, by their numbers in the table; the
    second gets the odd one.
    """
    first: list[int] = []
    second: list[int] = []
    for numbers in by_task(packed.samples):
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
    groups = by_task(packed.samples, among)
    if not groups:
        raise RunFolderError(
            "no task of the pack has two samples: one for the update, one to measure its effect. "
            "Set samples_per_task to 2 or more"
        )
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


def part_of(step: Step, samples: Sequence[int]) -> Step:
    """Return the rows of a step with labels of these samples, by their numbers in its rows' table,
    and with these labels alone.
    """
    rows = only(step.rows, samples)
    has = rows.labels != IGNORE_LABEL
    had = step.rows.labels != IGNORE_LABEL
    kept = torch.nonzero(has.any(dim=1)).squeeze(1).tolist()
    hidden = []
    if step.reference_hidden:
        hidden = [step.reference_hidden[row][has[row][had[row]]] for row in kept]
    chosen = rows.rows(kept)
    return dataclasses.replace(
        step,
        rows=chosen,
        normaliser=normaliser(rows),
        numbers=[step.numbers[row] for row in kept],
        num_rows=len(kept),
        signals={name: signal[kept] for name, signal in step.signals.items()},
        reference_hidden=hidden,
    )


def alone(step: Step, sample: int) -> Step:
    """Return the step with one sample's tokens in a row of their own: a pass computes nothing else,
    with the same results. sample: its number in the table of the step's rows. The normaliser stays
    that of the whole step.
    """
    rows = step.rows
    one = rows.samples[sample]
    on_path = torch.isin(rows.group_ids[one.row], torch.tensor(one.groups))
    place = on_path.nonzero().squeeze(1)
    tensors: dict[str, Any] = {
        name: tensor[one.row, place][None] for name, tensor in rows.tensors().items()
    }
    # No other sample shares its beginning here: all of it is one group.
    for name in ("group_ids", "parent_ids", "sample_ids"):
        tensors[name] = torch.zeros_like(tensors[name])
    table = [dataclasses.replace(one, row=0, groups=[0])]
    hidden = []
    if step.reference_hidden:
        trained = rows.labels[one.row] != IGNORE_LABEL
        hidden = [step.reference_hidden[one.row][rows.sample_ids[one.row][trained] == sample]]
    return dataclasses.replace(
        step,
        rows=dataclasses.replace(rows, samples=table, **tensors),
        numbers=[step.numbers[one.row]],
        num_rows=1,
        signals={name: signal[one.row, place][None] for name, signal in step.signals.items()},
        reference_hidden=hidden,
    )


class EntropyBatch:
    """Measure the entropy on drawn answers under any parameters.

    times: draws of each sample, by number in the pack's table. recorded: the pack's
    log-probabilities are the trainer's under the sampling policy; otherwise the policy, as it
    stands, has sampled.
    """

    def __init__(
        self,
        policy: Policy,
        packed: PackedTensors,
        times: Mapping[int, int],
        config: GRPOConfig,
        here: Ranks,
        recorded: bool = False,
    ) -> None:
        self._policy = policy
        self.device = here.device
        self._inputs = (packed, times, config, here, recorded)
        self._config = config
        full = {id(p): name for name, p in policy.named_parameters()}
        self._full_names = {name: full[id(p)] for name, p in policy.parameters_by_name().items()}
        chosen = only(packed, list(times))
        kept = (chosen.labels != IGNORE_LABEL).any(dim=1).nonzero().squeeze(1)
        table = chosen.sample_ids[kept].unique()
        rows = chosen.rows(kept.tolist())
        self._step = Step(rows, normaliser(rows), 1, kept.tolist(), len(kept))
        self._batches = list(self._step.microbatches(config, here.device))
        # Of the samples with labels, in the order of `by_sequence`.
        parts = zip(
            rows.sample_ids.split(config.rows_per_microbatch),
            (rows.labels != IGNORE_LABEL).split(config.rows_per_microbatch),
            strict=True,
        )
        numbers = torch.cat([torch.unique(ids[trained]) for ids, trained in parts])
        self._places: list[int] = numbers.tolist()
        self.numbers: list[int] = table[table >= 0][numbers].tolist()
        """Of the drawn samples in the pack's table, in the order of all results."""
        self.times = torch.tensor([times[number] for number in self.numbers], device=here.device)
        self.samples = [packed.samples[number] for number in self.numbers]
        self._tasks = sample_keys(self.samples)[:, 0].to(here.device)
        with torch.no_grad():
            seen = list(self._tables(None))
            self._start = [
                self._by_sequence(batch["logprobs"].flatten()[batch["trained"]].to(own), batch)
                if recorded
                else own
                for batch, (own, _) in zip(self._batches, seen, strict=True)
            ]
        entropies = _stacked([row for _, entropies in seen for row in entropies])
        baseline = others_mean(entropies, self.times)
        self._baselines = [
            part[:, : start.shape[1]]
            for part, start in zip(
                baseline.split([len(start) for start in self._start]), self._start, strict=True
            )
        ]
        terms = [
            entropy_estimates(*pair, start if recorded else None)
            for pair, start in zip(seen, self._start, strict=True)
        ]
        self.by_position = entropy_by_position(
            _stacked([row for _, better in terms for row in better]), self.times
        )
        self.entropies = tuple(
            self.mean(torch.cat([one[which].sum(dim=1) for one in terms])) for which in (0, 1)
        )
        self.start_logprobs = torch.cat([start.sum(dim=1) for start in self._start])
        """log π [S] of the sampling policy."""
        self.start_weights = torch.cat([own.sum(dim=1) for own, _ in seen]) - self.start_logprobs
        """log w [S] of the policy at hand: 0 if it has sampled."""

    def effective_size(self, log_w_S: Tensor) -> float:
        """Return (Σw)²/Σw² over draws, as a share."""
        return effective_size(log_w_S.repeat_interleave(self.times))

    def under(self, policy: Policy) -> "EntropyBatch":
        """Return the same answers under another policy, such as one of another dtype."""
        return EntropyBatch(policy, *self._inputs)

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

    def sequence(self, place: int) -> tuple[Tensor, Tensor]:
        """Return a sample's part of the mean of J, and its log-probability, at the policy's own
        parameters: scalars of one graph. The parts of all samples sum to the mean.
        """
        step = alone(self._step, self._places[place])
        (batch,) = step.microbatches(self._config, self.device)
        out = self._outputs({}, batch, grad=True)
        start, baseline = (
            [row for part in parts for row in part][place][None, : len(out.logprobs)]
            for parts in (self._start, self._baselines)
        )
        values, _ = importance_entropy(out.logprobs[None], out.entropy[None], start, baseline)
        share = int(self.times[place]) / int(self.times.sum())
        return values.sum() * share, out.logprobs.sum()

    def logprobs(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return log π [S] under other parameters."""
        with torch.no_grad():
            return torch.cat([table.sum(dim=1) for table, _ in self._tables(parameters)])

    def label_logprobs(self) -> Tensor:
        """Return the log-probabilities under the policy at hand, in the shape of the rows: NaN
        where there is no label.
        """
        rows = self._step.rows
        values = torch.full(rows.labels.shape, math.nan)
        with torch.no_grad():
            found = [self._outputs({}, batch, False).logprobs for batch in self._batches]
        values[rows.labels != IGNORE_LABEL] = torch.cat(found).cpu().float()
        return values

    @staticmethod
    def _by_sequence(values_N: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return by_sequence(values_N, batch["sample_ids"].flatten()[batch["trained"]])

    def _outputs(
        self, named: dict[str, Tensor], batch: dict[str, Tensor], grad: bool
    ) -> PolicyOutput:
        options = HeadOptions(trained=batch["trained"], entropy_grad=grad)
        out: PolicyOutput = functional_call(
            self._policy, named, (*policy_inputs(batch), options, batch.get("experts"))
        )
        return out

    def _tables(
        self, parameters: Mapping[str, Tensor] | None, grad: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-probabilities and entropies [S, T] of each microbatch."""
        named = {self._full_names[name]: value for name, value in (parameters or {}).items()}
        for batch in counted_off(self._batches, "microbatches of the entropy batch"):
            out = self._outputs(named, batch, grad)
            yield self._by_sequence(out.logprobs, batch), self._by_sequence(out.entropy, batch)


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


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

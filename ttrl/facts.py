"""Define the figures in a run's files: one name and one type each, for writers, readers and plots.

Step             a line of train.jsonl
PhaseFacts       the facts in a phase's marker, a class for each phase
MetricsRow       a line of metrics.jsonl

A missing figure is None and is not written (UNSET, if null in the file has a meaning of its own). A
missing group of figures is empty, so `row.train.entropy` always works. `read_facts` reads files of
older and newer versions: null and other types count as missing; other names are ignored.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, dataclass_transform, get_args

import msgspec
from msgspec import UNSET, UnsetType, field

from ttrl.text import flat, is_number, present, si

F = TypeVar("F", bound="Facts")
T = TypeVar("T")
Number: TypeAlias = float | None
Count: TypeAlias = int | None
Figure: TypeAlias = float | UnsetType | None


@dataclass_transform(frozen_default=True)
class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Figures under their names in a file."""

    def to_json(self) -> Mapping[str, Any]:
        """Return plain values, as they stand in the file."""
        values: dict[str, object] = msgspec.to_builtins(self)
        for one in _fields(type(self)):
            if isinstance(one.default, Facts) and getattr(self, one.name) == one.default:
                values.pop(one.name, None)
        return values

    def replace(self: F, **changes: Any) -> F:
        """Return the facts with some of them changed."""
        return msgspec.structs.replace(self, **changes)


@functools.cache
def _fields(kind: type[Facts]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields; msgspec resolves their annotations at each call."""
    return msgspec.structs.fields(kind)


def read_facts(kind: type[F], values: Mapping[str, Any]) -> F:
    """Return the facts of this kind in a JSON object."""
    found: dict[str, object] = {}
    for one in _fields(kind):
        value = _without_nulls(values.get(one.name))
        if value is None:
            continue
        nested = _facts_in(one.type)
        try:
            if nested is not None and isinstance(value, dict):
                found[one.name] = read_facts(nested, value)
            else:
                found[one.name] = msgspec.convert(value, one.type)
        except (msgspec.ValidationError, TypeError):
            continue
    return kind(**found)


def parse_facts(kind: type[F], line: bytes) -> F:
    """Read a JSON object as `read_facts` does; a well-formed line takes a thirtieth of the time.

    Raises ValueError for a line without JSON, TypeError without an object or a required fact.
    """
    # A null means different things to the two readers.
    if b"null" not in line:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=kind)
    values = json.loads(line)
    if not isinstance(values, dict):
        raise TypeError("no JSON object")
    return read_facts(kind, values)


def parse(kind: type[T], data: bytes | str) -> T:
    """Read JSON of exactly this kind; other names are ignored. Raises ValueError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def dumped(value: object) -> str:
    """Return the JSON of facts, records or plain values; NaN and infinity become null."""
    return msgspec.json.encode(value).decode()


def part_of(kind: type[F], facts: Facts) -> F:
    """Return the facts shared with another kind."""
    return kind(**{name: getattr(facts, name) for name in kind.__struct_fields__})


def number(figure: Figure) -> float | None:
    """Return a figure as a number; None if there is none."""
    if is_number(figure):
        return float(figure)
    return None


def numbers(figures: Iterable[Figure]) -> list[float]:
    """Return the figures with a number."""
    return present(map(number, figures))


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a share; None if a number is missing or the whole is 0."""
    if part is None or not whole:
        return None
    return part / whole


def _facts_in(kind: Any) -> "type[Facts] | None":
    """Return the kind of facts in a field; None for another field."""
    for one in get_args(kind) if isinstance(kind, UnionType) else (kind,):
        if isinstance(one, type) and issubclass(one, Facts):
            return one
    return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


# The trainer: lines of train.jsonl


class WorstPlace(Facts, omit_defaults=False):
    """A token with one of the largest differences: its place in the pack and both log-probabilities
    (None if not finite).
    """

    row: int = 0
    position: int = 0
    version: int = 0
    trainer: Number = None
    sampler: Number = None


class Difference(Facts):
    """How far sampler and trainer are apart: see `ttrl.training.sampler_drift.compare_tokens`."""

    tokens: Count = None
    not_finite: Count = None
    mean: Number = None
    """Nats, as `p999` and `max`."""
    p999: Number = None
    max: Number = None
    ess: Number = None
    ess_of_most: Number = None
    outside: Number = None


class ComparedTokens(Difference):
    """The difference over all tokens, with the worst tokens."""

    version: Count = None
    """The weights it was computed under, if not those at the start of training."""
    rows: Count = None
    """How many were compared, if not all."""
    unknown: Count = None
    tolerance: Number = None
    by_version: dict[str, Difference] | None = None
    by_position: list[float] | None = None
    worst: list[WorstPlace] | None = None


class SamplerTrainer(ComparedTokens):
    """The first step's comparison of sampler and trainer."""

    own_weights: ComparedTokens | None = None
    """In some rows, under the weights of the sampling policy."""

    @property
    def own(self) -> ComparedTokens:
        """Return the difference under the sampler's own weights; empty without one."""
        return self.own_weights or ComparedTokens()

    def without_tokens(self) -> "SamplerTrainer":
        """Return the figures without the tokens; those stay in train.jsonl."""
        own = self.own_weights
        if own is not None:
            own = own.replace(worst=None)
        return self.replace(worst=None, own_weights=own)


class NestedNoise(Facts):
    """A gradient's noise by source: estimates of one step. `prompts` and `signal` may come out
    below 0.
    """

    signal: float = field(default_factory=float)
    """|G|²."""
    prompts: float = field(default_factory=float)
    """a·P: the noise left with infinitely many samples of these prompts."""
    samples: float = field(default_factory=float)
    """E/K."""


class StepNoise(Facts):
    """The noise of one step's gradient: see `ttrl.instruments.gradient_noise.step_noise`."""

    pieces: Count = None
    samples: Count = None
    seconds: Number = None
    prompts: Number = None
    nested: NestedNoise | None = None
    noise: Number = None
    signal: Number = None
    layers: dict[str, tuple[float, float]] | None = None


class GradientNoise(Facts):
    """The noise over the last steps: see `ttrl.run_folder.recent_noise`."""

    steps: Count = None
    prompts: Number = None
    noise: Number = None
    signal: Number = None
    scale: Number = None
    low: Number = None
    high: Number = None
    share: Number = None
    layers: dict[str, float] | None = None
    from_sketch: bool | None = None
    from_samples: Number = None
    best_samples: Number = None
    best_prompts: Number = None
    gain: Number = None


class StepEntropy(Facts):
    """A step's predicted effect on the entropy: see `ttrl.instruments.online_entropy`."""

    first: Number = None
    """δH₁, in nats per answer, of the update by the other tasks."""
    naive: Number = None
    """The same of the whole update, measured on its own answers."""
    entropy: Number = None
    """H before the step."""
    error: Number = None
    """Standard error of H, over tasks."""
    tasks: Count = None
    answers: Count = None
    dtype: str | None = None
    """Of the forward and backward passes."""
    device: str | None = None
    seconds: Number = None


class EntropyResponse(Facts):
    """The means over an iteration's measured steps, and their cost."""

    steps: Count = None
    """Measured ones."""
    first: Number = None
    naive: Number = None
    entropy: Number = None
    seconds: Number = None
    share: Number = None
    """The measurements' share of the time of all steps."""


class StepMeans(Facts):
    """Figures of a step; an iteration has their means over its steps."""

    loss: Number = None
    policy_loss: Number = None
    value_loss: Number = None
    kl: Number = None
    kl_share: Number = None
    entropy: Number = None
    grad_norm: Number = None
    ess: Number = None
    peak_share: Number = None
    tokens_per_second: Number = None
    clip_fraction_low: Number = None
    clip_fraction_high: Number = None
    dual_clip_fraction: Number = None
    correction: Number = None
    capped_fraction: Number = None
    value_error: Number = None
    reward_model_loss: Number = None
    reward_model_accuracy: Number = None
    matmul_peak: Number = None
    kl_coefficient: Number = None


class StepFigures(StepMeans):
    """Figures both a step and an iteration have."""

    lr: Number = None
    global_step: Count = None
    flops: Number = None
    seconds: Number = None
    padding_tokens: Count = None
    logical_tokens: Count = None
    seconds_by_part: dict[str, float] | None = None
    memory_peaks: dict[str, float] | None = None


class RouterFigures(Facts):
    """The router metrics of a step. Lists have one entry per layer with experts."""

    layers: list[int]
    entropy: list[float]
    largest_load: list[float]
    unused: list[int]
    replayed: float
    """Share of the replayed tokens over all layers, as `differing` of otherwise routed ones."""
    differing: float


class Step(StepFigures):
    """A line of train.jsonl."""

    iteration: Count = None
    kl_loss: Number = None
    entropy_loss: Number = None
    chosen_fraction: Number = None
    ratio_min: Number = None
    ratio_max: Number = None
    value_grad_norm: Number = None
    reward_model_grad_norm: Number = None
    normaliser: Number = None
    flops_per_second: Number = None
    routing: RouterFigures | None = None
    skipped: str | None = None
    """The reason for skipping the step."""
    row_tokens: Count = None
    trained_tokens: Count = None
    flops_by_part: dict[str, float] | None = None
    sampler_trainer: SamplerTrainer | None = None
    gradient_noise: StepNoise | None = None
    entropy_response: StepEntropy | None = None
    held_out_loss: Number = None
    """Of supervised training, in its last line: over the conversations in `held_out`."""
    held_out_flops: Number = None

    def by_name(self, separator: str = ".") -> Mapping[str, Any]:
        """Return all values by flat names, "sampler_trainer.ess", as `MetricsRow.by_name`."""
        compared = self.sampler_trainer
        if compared is not None:
            compared = compared.replace(by_version=None)
        return flat(self.replace(sampler_trainer=compared).to_json(), separator)


class TrainFigures(StepFigures):
    """The optimizer steps of an iteration together."""

    steps: Count = None
    skipped: Count = None
    unchanged: bool | None = None
    """True if every weight is unchanged, bit for bit."""


# The parts of markers and metrics


class Sync(Facts):
    """How a policy came to the servers."""

    mode: str | None = None
    seconds: Number = None
    canary_max_difference: float | None = field(default_factory=NoneType)
    fell_back: str | None = field(default_factory=NoneType)
    """Why the servers were restarted."""
    files_because: str | None = None
    weights_compared: Count = None
    weights_unchecked: Count = None
    servers: Count = None
    left_out: dict[str, str] | None = None
    """Why, by address."""


class WeightsComparison(Facts, omit_defaults=False):
    """A vLLM worker's comparison of its weights with a source."""

    problems: list[str] = []
    """Differences, in words."""
    tensors: dict[str, str] = {}
    """SHA-256 of the bytes read, by a tensor's name (and number, for parts)."""
    compared: int = 0
    """Elements compared with the source."""
    unchecked: int = 0
    """Elements of parameters not comparable."""
    exact: bool = False
    """Whether packed copies were compared bit for bit, too."""
    failed: str | None = None
    """The reason for comparing nothing."""


class RolloutStats(Facts, omit_defaults=False):
    """Counts and means. Means are over graded samples; None without values."""

    num_tasks: int = 0
    num_samples: int = 0
    num_graded: int = 0
    num_failed: int = 0
    """Samples with an error instead of a reward; num_graded + num_failed + num_unfinished =
    num_samples.
    """
    num_unfinished: int = 0
    """Samples cut off by a token budget; they can be continued."""
    num_cached: int = 0
    """Samples with a completion from the cache."""
    num_turns: int = 0
    """Replies of the model in samples of rollouts."""
    num_breaks: int = 0
    """Replies with a prompt that does not continue an earlier turn token by token, first ones left
    out. They are trained as sequences of their own, and their prompts computed once more. 0 if the
    server gave no ids to tell.
    """
    mean_reward: Number = None
    metrics: dict[str, float] = {}
    """Each metric's mean over the graded samples with a value."""
    prompt_tokens: int = 0
    """Every task's prompt once, however many samples it has."""
    completion_tokens: int = 0
    mean_completion_tokens: Number = None
    """Over the completed samples, graded or not."""
    new_prompt_tokens: int = 0
    new_completion_tokens: int = 0
    """Tokens sent and sampled now, without those from the cache or earlier calls.
    """
    prefix_cached_tokens: int = 0
    """New prompt tokens from the server's own prefix cache."""
    spend: Number = None
    """Dollars for the new tokens; None without prices."""
    finish_reasons: dict[str, int] = {}
    exceptions: dict[str, int] = {}
    """Reasons and counts of failures of samples, graders, transforms and callbacks, the commonest
    first."""
    seconds: Number = None
    """Wall clock of the whole call; None for results read from a file."""
    tokens_per_second: Number = None
    """new_completion_tokens / seconds; None if all came from the cache."""
    partial_metrics: dict[str, int] = {}
    """Samples with each metric, if some graded samples lack it: its mean is over those only.
    """
    grading_seconds: Number = None
    """Seconds of grading, summed over samples; many run at once, during sampling too."""

    def only_some(self, metric: str) -> str:
        """Return " (12 of 64 samples)" for a metric missing in some graded samples, else ""."""
        count = self.partial_metrics.get(metric)
        if count is None:
            return ""
        return f" ({count} of {self.num_graded} samples)"

    def summary(self) -> str:
        """Return one line for the log."""
        parts = [f"{self.num_samples} samples of {self.num_tasks} tasks"]
        if self.seconds is not None:
            parts.append(f"{self.seconds:.1f} s")
        if self.mean_reward is not None:
            parts.append(f"mean reward {self.mean_reward:.3f}")
        parts += [
            f"{name} {value:.3f}{self.only_some(name)}" for name, value in self.metrics.items()
        ]
        if self.mean_completion_tokens is not None:
            each = f"{self.mean_completion_tokens:.1f} per sample"
            if self.tokens_per_second is not None:
                each += f", {si(self.tokens_per_second)} tokens/s"
            parts.append(f"{si(self.completion_tokens)} tokens ({each})")
        if self.spend is not None:
            parts.append(f"${self.spend:.4g}")
        for count, what in (
            (self.num_turns, "turns"),
            (self.num_cached, "from the cache"),
            (self.num_unfinished, "unfinished"),
            (self.num_failed, "failed"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return ", ".join(parts)

    def failures(self, most: int = 3) -> str:
        """Return the commonest reasons for failures with their counts, one line."""
        shown = [f"{count} × {reason}" for reason, count in list(self.exceptions.items())[:most]]
        if len(self.exceptions) > most:
            shown.append(f"{len(self.exceptions) - most} other reasons")
        return "; ".join(shown)


class SampledFlops(Facts):
    """The servers' work for a phase."""

    prefill: float = field(default_factory=float)
    decode: float = field(default_factory=float)
    per_second: Number = None
    """On one GPU (on CPUs of the whole machine)."""


class Staleness(Facts):
    """Iterations between a token's policy and the newest one."""

    mean: Number = None
    max: Count = None


class Unfinished(Facts):
    """The work a token budget cut off."""

    groups: Count = None
    samples: Count = None
    tokens: Count = None


class Standing(NamedTuple):
    """The last turn of a task."""

    round: int
    due: int
    """The round of the next one."""
    without: int
    """Turns in a row, up to this one, without a signal."""
    score: float | None
    """The mean of its samples; None until two could be graded."""


class CurriculumFigures(Facts):
    """Places of all tasks: see `ttrl.loop.task_stream.Curriculum.measured`."""

    round: Count = None
    total: Count = None
    unseen: Count = None
    solved: Count = None
    hopeless: Count = None
    between: Count = None
    level: Count = None
    level_score: Figure = UNSET


class CurriculumFacts(CurriculumFigures):
    """The same, with the consequences for later iterations."""

    turns: dict[str, Standing] = field(default_factory=lambda: {})
    """By the digest of the task."""
    level_scores: list[tuple[str, float]] | None = None


class Groups(Facts, omit_defaults=False):
    """Groups of an iteration with a signal, and why the others have none."""

    total: int = 0
    kept: int = 0
    all_right: int = 0
    all_wrong: int = 0
    other_equal: int = 0
    too_few: int = 0
    no_signal: int = 0
    no_signal_share: float = 0.0
    low_std: int = 0
    """Kept groups with a standard deviation below the floor."""


class AdvantageFigures(Facts):
    """The treatment of an iteration's rewards."""

    clipped: Count = None
    """Samples with a clipped advantage."""
    mean_abs: Number = None
    lowest: Number = None
    highest: Number = None
    shaped_reward: Number = None
    """The mean over all graded samples, if rewards are shaped."""
    surprise: Number = None
    """The mean, with a surprise bonus."""
    surprise_unknown: Count = None
    """Samples without any known log-probability."""


class RolloutFigures(Facts, omit_defaults=False):
    """Signs of learning in an iteration's rollouts; None if there is nothing to divide by."""

    truncated: Number = None
    """Share of the completed samples ended by the length limit."""
    truncated_reward: Number = None
    """Mean reward of these, if graded."""
    ended_reward: Number = None
    """Mean reward of the samples with an end of their own."""
    stopped_early: Number = None
    """Share of the completed samples ended by `early_stop`; None in a run without one."""
    empty: Number = None
    """Share of the completed samples without any text or token."""
    grader_failures: Count = None
    """Samples with a failed grader (of the failed ones)."""
    repeated: Number = None
    """Share of the graded samples with a completion written before by another sample of their
    group."""
    repeated_groups: Number = None
    """Share of the groups (of two or more) with one completion in all samples."""
    stuck_groups: Number = None
    """The same, of groups with a reward below the iteration's highest: no sample finds a better
    one.
    """
    commonest: Number = None
    """Share of the graded samples with the iteration's commonest completion."""
    commonest_tasks: Number = None
    """Share of the tasks with that completion."""
    length_correlation: Number = None
    """Correlation of reward and length within groups (both less their group's mean), as advantages
    see it. None if neither or only one varies.
    """
    mean_length: Number = None
    """Tokens of the completed samples (characters, if there are no tokens), as `max_length`."""
    max_length: Count = None


class PackFigures(Facts):
    """The training rows of an iteration."""

    advantages: AdvantageFigures = AdvantageFigures()
    rows: Count = None
    row_tokens: Count = None
    trained_tokens: Count = None
    tokenization: dict[str, int] | None = None
    """The fields of `ttrl.data.tokenization.TokenizationCounts`."""
    fill: Number = None
    dropped: dict[str, int] | None = None
    """See `ttrl.data.packing.packed.PackedTensors.dropped`."""


# Markers


class PhaseFacts(Facts):
    """A finished phase's facts in its marker."""

    phase: ClassVar[str]


class PrepareFacts(PhaseFacts):
    phase = "prepare"
    seconds: Number = None
    sync: Sync | UnsetType | None = UNSET


class SampledFacts(PhaseFacts):
    """A sampling phase."""

    seconds: Number = None
    sync_seconds: Number = None
    sync: Sync | UnsetType | None = UNSET
    stats: RolloutStats | None = None
    flops: SampledFlops | None = None


class RolloutsFacts(SampledFacts):
    phase = "rollouts"
    tasks_taken: Count = None
    """Of the stream, up to this iteration."""
    extra_tasks: Count = None
    dropped_groups: Count = None
    new_completion_tokens: Count = None
    staleness: Staleness = Staleness()
    unfinished: Unfinished | None = None
    curriculum: CurriculumFacts | None = None
    sessions: Count = None
    """Of `ttrl proxy`, up to this iteration."""
    left_out: Count = None
    """Samples of a run not graded again by its replay."""
    source: str | None = None
    """The SHA-256 of the rollouts graded again by a replay."""


class PackFacts(PackFigures, PhaseFacts):
    phase = "pack"
    seconds: Number = None
    groups: Groups = Groups()
    rollouts: RolloutFigures = RolloutFigures()


class TrainFacts(PhaseFacts):
    phase = "train"
    seconds: Number = None
    trained: bool | None = None
    """False if no group had a signal."""
    steps: list[Mapping[str, Any]] = []
    """The lines of train.jsonl."""
    saved: bool | None = None
    """False if checkpoint and state were not written (`save_every`)."""
    save_seconds: Number = None

    def taken(self) -> list[Step]:
        """Return the steps."""
        return [read_facts(Step, step) for step in self.steps]


class SaveFacts(PhaseFacts):
    phase = "save"
    seconds: Number = None


class ValidateFacts(SampledFacts):
    phase = "validate"
    sampling: str | None = None
    """How: "greedy, 64 tasks"."""
    intervals: dict[str, tuple[float, float]] | None = None
    """95% intervals of the reward and each metric."""


# config_history.jsonl


class ConfigChange(Facts, omit_defaults=False):
    """A line of config_history.jsonl: the changes of a start."""

    iteration: int = 0
    """The first iteration with these settings."""
    time: float = 0.0
    changes: dict[str, list[Any]] = {}
    """Before and now, by the names of settings."""


# metrics.jsonl


class PhaseSeconds(Facts):
    """Seconds of an iteration's phases; overlapping phases count in full."""

    prepare: Number = None
    sample: Number = None
    pack: Number = None
    train: Number = None
    validate: Number = None
    sync: Number = None
    total: Number = None
    """Of the whole iteration."""

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase present, without their total."""
        values: dict[str, float] = msgspec.to_builtins(self)
        values.pop("total", None)
        return values

    @property
    def unnamed(self) -> float:
        """Return the time outside of all phases."""
        return max(0.0, (self.total or 0.0) - sum(self.by_phase().values()))


class Flops(Facts):
    """An iteration's FLOPs by purpose; `total`, and `cumulated` over the run."""

    prefill: Number = None
    decode: Number = None
    validation: Number = None
    training: Number = None
    recomputation: Number = None
    prepass: Number = None
    reference: Number = None
    reward_model: Number = None
    total: Number = None
    cumulated: Number = None

    @property
    def before_gradient(self) -> float | None:
        """Return the FLOPs before the policy's gradient: passes of policy and reference, and the
        reward model's training.
        """
        known = present((self.prepass, self.reference, self.reward_model))
        if not known:
            return None
        return sum(known)


FLOPS_PARTS = Flops.__struct_fields__[:-2]


class ServerFigures(Facts):
    """The servers' speed while they sampled."""

    flops_per_second: Number = None
    peak_share: Number = None


class GpuUse(Facts):
    """A GPU's utilisation, as far as it reports it."""

    busy: Number = None
    """Share of the time with a kernel running."""
    watts: Number = None
    memory: Number = None
    """Bytes."""


class PhaseUse(Facts):
    """The machine's utilisation during one phase of a run."""

    seconds: Number = None
    cpu: Number = None
    """Share of all cores at work."""
    memory: Number = None
    """The most bytes in use."""
    gpu_busy: Number = None
    watts: Number = None
    """Of all GPUs together."""
    gpus: list[GpuUse] | None = None


class MachineUse(Facts):
    """The machine's utilisation, by the run's phase."""

    sample: PhaseUse = PhaseUse()
    train: PhaseUse = PhaseUse()
    both: PhaseUse = PhaseUse()
    other: PhaseUse = PhaseUse()
    """Neither."""


class MetricsRow(Facts):
    """A line of metrics.jsonl: an iteration's learning and its cost."""

    iteration: int
    seconds: PhaseSeconds = PhaseSeconds()
    reward: Figure = UNSET
    metrics: dict[str, float] | None = None
    partial_metrics: dict[str, int] | None = None
    samples: Count = None
    failed: Count = None
    finish_reasons: dict[str, int] | None = None
    prompt_tokens: Count = None
    completion_tokens: Count = None
    tokens_per_second: Figure = UNSET
    grading_seconds: Number = None
    new_completion_tokens: Count = None
    staleness: Staleness = Staleness()
    unfinished: Unfinished = Unfinished()
    dropped_groups: Count = None
    extra_tasks: Count = None
    curriculum: CurriculumFigures = CurriculumFigures()
    groups: Groups = Groups()
    rollouts: RolloutFigures = RolloutFigures()
    pack: PackFigures = PackFigures()
    trained: bool | None = None
    train: TrainFigures = TrainFigures()
    sampler_trainer: SamplerTrainer | UnsetType | None = UNSET
    gradient_noise: GradientNoise = GradientNoise()
    entropy_response: EntropyResponse = EntropyResponse()
    validation_reward: Figure = UNSET
    validation: dict[str, float] | None = None
    validation_samples: Count = None
    validation_failed: Count = None
    validation_partial_metrics: dict[str, int] | None = None
    validation_sampling: str | None = None
    validation_intervals: dict[str, tuple[float, float]] | None = None
    flops: Flops = Flops()
    server: ServerFigures = ServerFigures()
    sync: Sync = Sync()
    dead_seconds: Number = None
    machine: MachineUse = MachineUse()

    @property
    def compared(self) -> SamplerTrainer:
        """Return the drift between sampler and trainer; empty if they were not compared."""
        return self.sampler_trainer or SamplerTrainer()

    def by_name(self, separator: str = ".") -> Mapping[str, Any]:
        """Return all values by flat names, "train.entropy", without figures by weights version:
        their names differ in each iteration.
        """
        compared = self.compared.replace(by_version=None)
        row = self.replace(sampler_trainer=compared)
        return flat(row.to_json(), separator)

    def metric(self, name: str) -> Figure:
        """Return the reward, or the mean of a metric over the iteration's samples."""
        if name == "reward":
            return self.reward
        return (self.metrics or {}).get(name)

    def held_out(self, name: str) -> Figure:
        """Return the held-out reward, or the mean of a metric over held-out samples."""
        if name == "reward":
            return self.validation_reward
        return (self.validation or {}).get(name)


Pick: TypeAlias = Callable[[MetricsRow], Figure]
"""Name a figure of a row: `lambda row: row.train.entropy`."""


def points(rows: Iterable[MetricsRow], pick: Pick) -> list[tuple[int, float]]:
    """Return (iteration, number) of each row with the figure."""
    found = ((row.iteration, number(pick(row))) for row in rows)
    return [(iteration, figure) for iteration, figure in found if figure is not None]


def metric(name: str) -> Pick:
    """Return a function to pick the reward, or a metric over an iteration's samples."""
    return lambda row: row.metric(name)


def held_out(name: str) -> Pick:
    """Return a function to pick the held-out reward, or a metric over held-out samples."""
    return lambda row: row.held_out(name)

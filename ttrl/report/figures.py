"""Draw the report's charts: learning, time, samples, training, and every other metric as a small
curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from ttrl.facts import Pick, held_out, metric, number, numbers, ratio
from ttrl.monitoring.drift import limits
from ttrl.monitoring.progress_line import dead_share
from ttrl.report import phrases
from ttrl.report.charts import Series, line_chart, sparkline, stacked_bars
from ttrl.run_folder.reader import (
    PHASES,
    RunData,
    held_out_metric,
    held_out_sampling,
    interval,
    phase_columns,
)
from ttrl.text import compact, is_number, percent, present

_OTHER_SHARES = 4
"""The number of colours left."""
MOST = 200
"""Columns: a run with other metric names in each iteration must not make an endless page."""


@dataclass(frozen=True)
class Figure:
    """A chart with its title and an explaining caption."""

    title: str
    caption: str
    chart: Markup
    keys: list[tuple[str, str]] = field(default_factory=list)
    """The legend: (class of the colour, name); empty with nothing to tell apart."""


def _lines(
    run: RunData, title: str, caption: str, series: Sequence[Series], band: str = "", **options: Any
) -> list[Figure]:
    """Return a figure of the series with values; empty without any. band: the meaning of a shaded
    band.
    """
    known = [one for one in series if any(value is not None for value in one.values)]
    chart = line_chart(title, run.iterations, known, **options)
    if chart is None:
        return []
    return [Figure(title, caption, chart, _legend(known, band))]


def _legend(series: Sequence[Series], band: str = "") -> list[tuple[str, str]]:
    keys = [(f"f{one.color}", one.name) for one in series]
    if band:
        return [*keys, (f"band f{series[0].color}", band)]
    if len(keys) > 1:
        return keys
    return []


def _line(run: RunData, title: str, pick: Pick, caption: str, **options: Any) -> list[Figure]:
    return _lines(run, title, caption, [Series(title, run.column(pick))], **options)


def _bars(
    run: RunData, title: str, caption: str, series: Sequence[Series], **options: Any
) -> list[Figure]:
    """Return a figure of the series ever above zero; empty without any."""
    known = [one for one in series if any((value or 0) > 0 for value in one.values)]
    bars = stacked_bars(title, run.iterations, known, **options)
    if bars is None:
        return []
    chart, together = bars
    if together > 1:
        means = f" Each bar is the mean of {together} iterations."
    else:
        means = ""
    return [Figure(title, caption + means, chart, _legend(known))]


def _coloured(columns: Mapping[str, Sequence[float | None]], first: int = 1) -> list[Series]:
    """Return a series of each column, in colours from `first` on."""
    named = enumerate(columns.items(), first)
    return [Series(name, values, color) for color, (name, values) in named]


def learning(run: RunData) -> list[Figure]:
    """Return reward and validation, with intervals."""
    rewards = present([*run.column(metric("reward")), *run.column(held_out("reward"))])
    y_range = (0.0, 1.0) if all(0 <= value <= 1 for value in rewards) else None
    validated: list[Series] = []
    band = ""
    label = "exact match"
    name = "exact"
    judged = held_out_metric(run)
    if judged is not None:
        intervals = [interval(row, judged.name) for row in run.rows]
        low, high = ([one[side] if one else None for one in intervals] for side in (0, 1))
        has_band = any(one is not None for one in intervals)
        is_reward = judged.name == "reward"
        shown = Series(judged.label, run.column(judged.of), 2 if is_reward else 1)
        if has_band:
            band = f"95% interval of {judged.label}"
            shown = replace(shown, low=low, high=high)
        validated.append(shown)
        if not is_reward:
            label = judged.label
            name = judged.name
            rewards_held_out = run.column(held_out("reward"))
            validated.append(Series("reward", rewards_held_out, 2, dashed=True))
        validated += _other_shares(run, judged.name)
    training = [
        Series(label, run.column(metric(name)), 1),
        Series("reward", run.column(metric("reward")), 2, dashed=True),
    ]
    title = "Held out"
    caption = "Tasks the run never trains on."
    if phrases.is_overfit(run):
        title = "Training tasks, asked again"
        caption = "The training tasks themselves (--overfit)."
    caption += " Iteration 0 is the starting model."
    how = held_out_sampling(run)
    if how:
        caption += f" Sampled: {how}."
    if band:
        caption += " The band is the 95% interval of the mean over other tasks of this kind."
    before = "Mean over the samples of each iteration, before its update."
    some = None
    if run.trained:
        some = (run.trained[-1].partial_metrics or {}).get(name)
    if some:
        before += f" Not every sample has {name}: the mean is over the others"
        before += f", {some} in the newest iteration."
    return [
        *_lines(run, title, caption, validated, band, y_range=y_range),
        *_lines(run, "Training", before, training, y_range=y_range),
    ]


def _other_shares(run: RunData, shown: str) -> list[Series]:
    """Return the other held-out metrics between 0 and 1, at most four: a rising reward may solve
    nothing.
    """
    names = sorted({name for row in run.rows for name in row.validation or {}} - {shown})
    columns = [(name, run.column(held_out(name))) for name in names]
    shares = [
        (name, values)
        for name, values in columns
        if any(value is not None for value in values)
        and all(0 <= value <= 1 for value in values if value is not None)
    ]
    return _coloured(dict(shares[:_OTHER_SHARES]), 3)


def time(run: RunData) -> list[Figure]:
    """Return seconds of each phase, dead time, tokens per second, and the machine's utilisation."""
    columns = phase_columns(run)
    phases = _coloured({name: columns[name] for name in (*PHASES, "other")})
    busy = {
        "of the peak, while training": run.column(lambda row: row.train.peak_share),
        "over the whole iteration": phrases.utilisation(run),
        "of the server, while sampling": run.column(lambda row: row.server.peak_share),
    }
    uses = {
        "sampling": [row.machine.sample for row in run.rows],
        "training": [row.machine.train for row in run.rows],
        "both at once": [row.machine.both for row in run.rows],
    }
    cores = {f"CPU, {name}": [use.cpu for use in used] for name, used in uses.items()}
    gpus = {f"GPU, {name}": [use.gpu_busy for use in used] for name, used in uses.items()}
    watts = {name: [use.watts for use in used] for name, used in uses.items()}
    flops = [row.flops for row in run.rows]
    parts = {
        "prefill": [one.prefill for one in flops],
        "decode": [one.decode for one in flops],
        "validation": [one.validation for one in flops],
        "training": [one.training for one in flops],
        "recomputation": [one.recomputation for one in flops],
        "before the gradient": [one.before_gradient for one in flops],
    }
    return [
        *_bars(
            run,
            "Seconds per phase",
            "Seconds of each iteration. Overlapping phases are counted in full.",
            phases,
            unit=" s",
        ),
        *_lines(
            run,
            "Dead time",
            "Share of an iteration without sampling or training.",
            [Series("dead time", run.column(dead_share), 4)],
            percent=True,
            y_range=(0.0, 1.0),
        ),
        *_line(
            run,
            "Tokens per second",
            lambda row: row.tokens_per_second,
            "Sampled tokens per second of sampling.",
            from_zero=True,
        ),
        *_lines(
            run,
            "Utilisation",
            "FLOP/s of trainer and server as a share of the speed of the model's largest matrix "
            "product, as the trainer measured it here.",
            _coloured(busy),
            percent=True,
            from_zero=True,
        ),
        *_lines(
            run,
            "Processors at work",
            "Share of busy cores, and of the time with any kernel on a GPU (NVML): over the whole "
            "machine and all its users, as the average of each phase.",
            _coloured(cores | gpus),
            percent=True,
            y_range=(0.0, 1.0),
        ),
        *_lines(
            run,
            "Power",
            "Watts of all GPUs together, as the average of each phase.",
            _coloured(watts, 4),
            from_zero=True,
        ),
        *_bars(
            run,
            "FLOPs",
            "Computed work: prompts read (without tokens from the prefix cache) and tokens "
            "written, the validation, forward and backward pass, recomputation in the backward "
            "pass, and the earlier passes of policy, reference and reward model.",
            _coloured(parts),
        ),
    ]


def _shares(run: RunData, whole: Pick, parts: Mapping[str, tuple[Pick, int]]) -> list[Series]:
    """Return parts of a whole as shares, each by its name with its colour."""
    wholes = run.column(whole)
    return [
        Series(name, list(map(ratio, run.column(pick), wholes)), color)
        for name, (pick, color) in parts.items()
    ]


def sampling(run: RunData) -> list[Figure]:
    """Return the charts of the samples, and their age."""
    groups = _shares(
        run,
        lambda row: row.groups.total,
        {
            "all right": (lambda row: row.groups.all_right, 3),
            "all wrong": (lambda row: row.groups.all_wrong, 4),
            "equal otherwise": (lambda row: row.groups.other_equal, 6),
            "kept, but below the floor": (lambda row: row.groups.low_std, 5),
        },
    )
    endings = [
        Series("cut off at the limit", run.column(lambda row: row.rollouts.truncated), 4),
        Series("stopped early", run.column(lambda row: row.rollouts.stopped_early), 5),
        Series("repeated in their group", run.column(lambda row: row.rollouts.repeated), 1),
        Series("failed", phrases.failed_shares(run), 2),
    ]
    last_turn = _shares(
        run,
        lambda row: row.curriculum.total,
        {
            "all right": (lambda row: row.curriculum.solved, 3),
            "rewards differ": (lambda row: row.curriculum.between, 1),
            "equal otherwise": (lambda row: row.curriculum.hopeless, 4),
            "not graded yet": (lambda row: row.curriculum.unseen, 6),
        },
    )
    lengths = run.column(lambda row: ratio(row.completion_tokens, row.samples))
    correlation = "Correlation within groups: above 0, longer replies get more reward."
    staleness = "Iterations between a token's policy and the newest one."
    extra = "Further tasks for dynamic sampling to find groups with a signal."
    return [
        *_bars(
            run,
            "Groups without signal",
            "Share of tasks with equal rewards for all samples: they teach nothing and are left "
            "out.",
            groups,
            percent=True,
        ),
        *_bars(
            run,
            "Curriculum",
            "All tasks, by the samples of their last turn. After equal rewards, a task pauses for "
            "a while.",
            last_turn,
            percent=True,
        ),
        *_line(
            run,
            "Level",
            lambda row: row.curriculum.level,
            "The hardest level sampled so far.",
            from_zero=True,
        ),
        *_lines(
            run,
            "Endings and repetitions",
            "Share of the samples. For solved tasks, equal replies are no problem.",
            endings,
            percent=True,
            from_zero=True,
        ),
        *_lines(
            run,
            "Tokens per completion",
            "Mean length of the model's replies.",
            [Series("mean length", lengths)],
            from_zero=True,
        ),
        *_line(
            run,
            "Reward against length",
            lambda row: row.rollouts.length_correlation,
            correlation,
            y_range=(-1.0, 1.0),
        ),
        *_line(run, "Staleness", lambda row: row.staleness.mean, staleness, from_zero=True),
        *_line(
            run,
            "Unfinished samples",
            lambda row: row.unfinished.samples,
            "Cut off by the token budget and continued later.",
            from_zero=True,
        ),
        *_line(run, "Extra tasks", lambda row: row.extra_tasks, extra, from_zero=True),
    ]


def training(run: RunData) -> list[Figure]:
    """Return the charts of the policy's movement."""
    clipped = {
        "from above": run.column(lambda row: row.train.clip_fraction_high),
        "from below": run.column(lambda row: row.train.clip_fraction_low),
    }
    own = run.column(lambda row: row.compared.own.p999)
    apart = {
        "mean": run.column(lambda row: row.compared.mean),
        "99.9th percentile": run.column(lambda row: row.compared.p999),
        "99.9th percentile under the sampler's own weights": own,
    }
    entropy = "Nats per token: how undecided the model is. At zero, all its samples are the same."
    return [
        *_line(run, "Entropy", lambda row: row.train.entropy, entropy),
        *_line(
            run,
            "Gradient norm",
            lambda row: row.train.grad_norm,
            "Before clipping.",
            from_zero=True,
        ),
        *_gradient_noise(run),
        *_entropy_response(run),
        *_lines(
            run,
            "Clipped tokens",
            "Share of the tokens without a gradient because their ratio left the trusted range.",
            _coloured(clipped),
            percent=True,
            from_zero=True,
        ),
        *_line(
            run, "KL to the reference model", lambda row: row.train.kl, _kl_of(run), from_zero=True
        ),
        *_line(
            run,
            "Reward model",
            lambda row: row.train.reward_model_loss,
            "Cross entropy of the outcomes, in nats per sample; 0.69 is a guess.",
            from_zero=True,
        ),
        *_lines(
            run,
            "Sampler against trainer",
            _apart(run),
            _coloured(apart),
            log=True,
        ),
        *_line(
            run,
            "Effective sample size",
            lambda row: row.compared.ess,
            "Share of the tokens left in effect by the weights trainer/sampler. At 100%, sampler "
            "and trainer have the same policy.",
            percent=True,
            y_range=(0.0, 1.0),
        ),
    ]


def _apart(run: RunData) -> str:
    """Explain the chart of sampler and trainer, with the run's own limits."""
    config = run.config
    allowed = limits(config.get("dtype"), config.get("device"), config.get("drift_limits"))
    named = {"means": allowed.mean, "99.9th percentiles": allowed.p999}
    beyond = " or ".join(
        f"{name} above {compact(limit)}" for name, limit in named.items() if limit is not None
    )
    text = (
        "|Difference| between the sampler's and the trainer's log-probabilities of the sampled "
        "tokens, in nats. Rounding causes some, more in larger models and in bf16: "
        "docs/explanation/drift.md lists the figures of healthy runs."
    )
    if beyond:
        text += f" For this run's dtype and device, {beyond} mean other weights or settings"
        text += ", unless the policy has moved since."
    return text


def _gradient_noise(run: RunData) -> list[Figure]:
    """Return the noise scale with its interval, and the sources of the noise, with advice from the
    newest measurement.
    """
    low = run.column(lambda row: row.gradient_noise.low)
    high = run.column(lambda row: row.gradient_noise.high)
    known = [a is not None and b is not None for a, b in zip(low, high, strict=True)]
    band = [
        [value if both else None for value, both in zip(side, known, strict=True)]
        for side in (low, high)
    ]
    scale = Series(
        "noise scale",
        run.column(lambda row: row.gradient_noise.scale),
        1,
        *(band if any(known) else ()),
    )
    batch = Series(
        "prompts of a step", run.column(lambda row: row.gradient_noise.prompts), 2, dashed=True
    )
    scales = (
        "Number of prompts at which a step's gradient has as much noise as signal, over the last "
        "16 steps. Well below it, more prompts per step are worth their cost; well above it, use "
        "fewer prompts and more steps."
    )
    if any(row.gradient_noise.from_sketch for row in run.trained):
        scales += (
            " Steps of a single microbatch measure it on a sketch of the gradient, taken at "
            "layers between the decoder's; rows_per_microbatch decides."
        )
    parts = (
        "Share of the noise from drawing few samples of each prompt; the rest comes from drawing "
        "few prompts. " + phrases.allocation(run)
    )
    from_samples = [Series("from samples", run.column(lambda row: row.gradient_noise.from_samples))]
    return [
        *_lines(
            run,
            "Gradient noise scale",
            scales,
            [scale, batch],
            "95% interval" if any(known) else "",
            log=True,
        ),
        *_lines(run, "Noise from samples", parts, from_samples, percent=True, y_range=(0.0, 1.0)),
    ]


def _entropy_response(run: RunData) -> list[Figure]:
    """Return the predicted effect of a step on the entropy, with its cost."""
    known = numbers(row.entropy_response.share for row in run.trained)
    text = (
        "Nats per answer: the first order η⟨∇H, v⟩ of the measured steps. Below 0, a step makes "
        "answers more alike. Measured on a quarter of a step's tasks, for the update by the "
        "others; measured on the update's own answers, it is biased."
    )
    if known:
        text += f" The measurements take {percent(sum(known) / len(known))} of the steps' time."
    series = [
        Series("η⟨∇H, v⟩", run.column(lambda row: row.entropy_response.first), 1),
        Series(
            "on the update's own answers",
            run.column(lambda row: row.entropy_response.naive),
            2,
            dashed=True,
        ),
    ]
    return _lines(run, "A step's effect on the entropy", text, series)


def every_metric(run: RunData) -> list[tuple[str, Markup, list[str]]]:
    """Return all numbers of metrics.jsonl, by name: a small curve each, with the first, lowest,
    highest and last value.

    Figures by weights version are left out: each iteration has other names.
    """
    flat = [row.by_name() for row in run.rows]
    names = {name: None for row in flat for name, value in row.items() if is_number(value)}
    names.pop("iteration", None)
    rows = []
    for name in sorted(list(names)[:MOST]):
        values = [number(row.get(name)) for row in flat]
        known = present(values)
        rows.append(
            (
                name,
                sparkline(values),
                [compact(value) for value in (known[0], min(known), max(known), known[-1])],
            )
        )
    return rows


def _kl_of(run: RunData) -> str:
    training = run.config.get("training") or {}
    kind = training.get("kl_estimator", "k3")
    if kind == "full":
        how = "Over the whole vocabulary"
    else:
        how = f"{kind} estimate"
    return f"{how}, weighted as in the loss" + (
        "; of some rows alone (watch_kl)." if training.get("watch_kl") else "."
    )

"""Rules about how the policy moves and what comes of it: entropy, clipping, gradients, KL, weights, reward."""

import statistics
from collections.abc import Callable
from typing import Any

from ttrl.monitoring.drift import exceeded, judged_figures, limits
from ttrl.monitoring.finding import RECENT, Finding, History, recently, trend
from ttrl.run_folder.reader import number
from ttrl.text import compact, percent


def entropy_fell(h: History) -> Finding | None:
    now, start = h.now("train.entropy"), h.at_start("train.entropy")
    right = h.share("groups.all_right", "groups.total") or 0.0
    # A policy that has solved its tasks is sure of them, and rightly: only uncertainty that was lost before counts.
    if now is None or start is None or right > 0.5 or now > max(0.2 * start, 0.0) or start < 0.02:
        return None
    return Finding(
        "entropy_fell",
        "warn",
        f"Entropy fell from {compact(start)} to {compact(now)} nats per token while most groups are not solved.",
        "The policy stopped exploring: a lower lr, clip_high above clip_low, an entropy_coefficient, or clip_cov or kl_cov.",
        "repeated",
    )


def entropy_rose(h: History) -> Finding | None:
    now, start = h.now("train.entropy"), h.at_start("train.entropy")
    # Twice as undecided and half a nat more: each token is then drawn from e^0.5 = 1.6 times as many.
    if now is None or start is None or now <= 2 * start or now - start <= 0.5:
        return None
    return Finding(
        "entropy_rose",
        "warn",
        f"Entropy rose from {compact(start)} to {compact(now)} nats per token.",
        "The policy falls apart into noise: lower lr or entropy_coefficient, and look at what it writes.",
        "longest",
    )


def clipped(h: History) -> Finding | None:
    low, high = h.now("train.clip_fraction_low") or 0.0, h.now("train.clip_fraction_high") or 0.0
    # PPO's implementations report 0.05 to 0.2; beyond 0.3 the later updates of an iteration are mostly thrown away.
    if low + high <= 0.3:
        return None
    return Finding(
        "clipped",
        "warn",
        f"{percent(low + high)} of the tokens were clipped ({percent(high)} from above, {percent(low)} from below).",
        "The policy moves too far within an iteration: a lower lr or fewer updates_per_iteration.",
    )


def no_gradient(h: History) -> Finding | None:
    norms = h.values("train.grad_norm", h.recent)
    if not norms or max(norms) >= 1e-9:
        return None
    return Finding(
        "no_gradient",
        "stop",
        f"The gradient is zero in {recently(h)}.",
        "Nothing reaches the weights: are all advantages or weights zero, or is everything frozen?",
    )


def gradient_grew(h: History) -> Finding | None:
    norms = h.values("train.grad_norm")
    if len(norms) < 2 * RECENT:
        return None
    first, last = (statistics.median(part) for part in (norms[:RECENT], norms[-RECENT:]))
    # Norms grow by small factors as fewer groups are left; ten times is a policy that runs away.
    if not first or last <= 10 * first:
        return None
    return Finding(
        "gradient_grew",
        "warn",
        f"The gradient norm grew from {compact(first)} to {compact(last)} (medians of five iterations).",
        "Lower lr, lower max_grad_norm, or look at single samples with extreme advantages.",
    )


def kl_blew_up(h: History) -> Finding | None:
    now, start = h.now("train.kl"), h.at_start("train.kl")
    # Per token: at 0.5 nats a sentence of 20 tokens is e^10 times as likely as under the reference.
    if now is None or not (now > 0.5 or (start is not None and now > 0.05 and now > 20 * max(start, 1e-6))):
        return None
    before = f" from {compact(start)}" if start is not None else ""
    return Finding(
        "kl_blew_up",
        "warn",
        f"KL to the reference model went up{before} to {compact(now)} nats per token.",
        "The policy left its reference: a lower lr, a higher kl_coefficient, or a new reference, if it should leave.",
        "longest",
    )


def kl_rules(h: History) -> Finding | None:
    share = h.now("train.kl_share")
    if share is None or share <= 0.9:
        return None
    return Finding(
        "kl_rules",
        "warn",
        f"{percent(share)} of the loss is the KL term.",
        "The reward hardly counts: a lower kl_coefficient.",
    )


def learning_rate_zero(h: History) -> Finding | None:
    rates = h.values("train.lr", h.recent)[-2:]
    if len(rates) < min(2, len(h.recent)) or not rates or max(rates) > 0:
        return None
    return Finding(
        "learning_rate_zero",
        "stop",
        "The learning rate is 0.",
        "lr, or the end of its schedule: see training in config.yaml.",
    )


def weights_unchanged(h: History) -> Finding | None:
    numbers = tuple(
        row["iteration"] for row in h.recent if isinstance(row.get("train"), dict) and row["train"].get("unchanged") is True
    )
    if not numbers:
        return None
    return Finding(
        "weights_unchanged",
        "stop",
        f"After training, the weights are bit for bit what they were before (iteration {numbers[-1]}).",
        "A learning rate of 0, skipped steps, everything frozen, or a checkpoint_dtype too coarse for such small steps.",
        iterations=numbers,
    )


# What comes of it


def reward_trend(h: History) -> Finding | None:
    """Flat or falling, by a line through all iterations. At |t| below 2 the slope cannot be told from zero (95%)."""
    name, points = h.held_out()
    label = f"The held-out {name}"
    if len(points) < 8:
        label, points = (
            "The training reward",
            [(r["iteration"], v) for r in h.iterations if (v := number(r, "reward")) is not None],
        )
    line = trend(points)
    if line is None or line.count < 8:  # with fewer, only a steep rise shows through the noise
        return None
    values = [y for _, y in points]
    if all(0 <= y <= 1 for y in values) and statistics.fmean(values[-RECENT:]) >= 0.9:
        return None  # nearly all there is to be had
    said = f"{line.slope:+.2g} ± {1.96 * line.error:.1g} per iteration, over {line.count}"
    # Neighbouring iterations share tasks and weights, so that the error is too small: a fall has to be clear.
    if line.t < -3:
        return Finding("reward_falls", "warn", f"{label} falls ({said}).", _FALLING, "wrong")
    if line.t < 2:
        return Finding("reward_flat", "warn", f"{label} does not rise beyond its noise ({said}).", _FLAT, "wrong")
    return None


_FALLING = (
    "Lower lr, fewer updates_per_iteration, a kl_coefficient; go back to the best checkpoint. Is the difference of sampler and "
    "trainer small?"
)
_FLAT = (
    "See what else stands out here. If nothing does: more samples or tasks per iteration against the noise, a higher lr "
    "(gradients and clipped tokens say whether there is room), more iterations."
)


def overfits(h: History) -> Finding | None:
    name, points = h.held_out()
    training = trend([(row["iteration"], known) for row in h.iterations if (known := number(row, "reward")) is not None])
    held_out = trend(points)
    if training is None or held_out is None or held_out.count < 8 or training.t < 3 or held_out.t > -3:
        return None
    return Finding(
        "overfits",
        "warn",
        f"The training reward rises while the held-out {name} falls.",
        "The run learns its tasks by heart, or a weakness of the grader: more tasks, fewer epochs, a look at what is rewarded.",
        "right",
    )


def drift(h: History) -> Finding | None:
    """The newest iteration in which tokens of the policy that training started from are beyond the limits."""
    held_to = limits(h.config.get("dtype"), h.config.get("device"), h.config.get("drift_limits"))
    for row in reversed(h.recent):
        compared = row.get("sampler_trainer")
        if not isinstance(compared, dict):
            continue
        # Rows of older versions of ttrl know no versions; with stale tokens among them they say nothing about drift.
        figures = compared if "staleness" not in row else None
        if isinstance(compared.get("by_version"), dict):
            training = h.config.get("training")
            judged = judged_figures(compared, _policy_before(h, row), training if isinstance(training, dict) else {})
            figures = None if judged is None else judged.figures
        if isinstance(figures, dict) and (beyond := exceeded(figures, held_to)):
            here = row["iteration"]
            return Finding(
                "drift",
                "warn",
                f"In iteration {here}, sampler and trainer did not compute the same ({'; '.join(beyond)}).",
                f"What was sampled is not quite what was trained; iterations/{here:04d}/drift.json names tokens and causes, if "
                "the run was held to its limits.",
                iterations=(here,),
            )
    return None


def off_policy(h: History) -> Finding | None:
    share = h.now("sampler_trainer.ess")
    if share is None or share >= 0.5 or drift(h) is not None:  # then what is far apart is no matter of older policies
        return None
    return Finding(
        "off_policy",
        "warn",
        f"The effective sample size is {percent(share)}: what was sampled is far from what is trained.",
        "Fewer updates between sampling and training: a smaller max_staleness, fewer off-policy steps, or a lower lr.",
    )


def _policy_before(h: History, row: dict[str, Any]) -> int:
    """The policy that the iteration's training starts from: an iteration that trained nothing has no policy of its own."""
    before = (one for one in h.iterations if one["iteration"] < row["iteration"] and one.get("trained") is not False)
    return max((one["iteration"] for one in before), default=0)


POLICY: tuple[Callable[[History], Finding | None], ...] = (
    drift, weights_unchanged, learning_rate_zero, no_gradient, reward_trend, overfits, off_policy, entropy_fell, entropy_rose,
    clipped, gradient_grew, kl_blew_up, kl_rules,
)  # fmt: skip

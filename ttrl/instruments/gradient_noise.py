"""Estimate the noise in a step's gradient, its sources, and the batch size it suggests. Plain
Python, no torch.

A step's gradient g is a mean over B drawn examples, so E[g] = G and tr Cov(g) = S/B, and

    E|g|² = |G|² + S/B.                                                                          (1)

The gradient noise scale S/|G|² is the batch with equal noise and signal ("An empirical model of
large-batch training", arXiv 1812.06162): far below it, twice the batch is worth twice the steps;
far above it, nothing. It needs no extra gradient: g = Σ h_j is a sum of pieces anyway, one for each
microbatch and rank, and their norms are read in passing.

**From pieces** (`noise_of_pieces`). Let piece j have the share f_j of the examples. Independent
pieces have E h_j = f_j·G and tr Cov(h_j) = f_j·n with n = tr Cov(g) = S/B. So, with F = Σ f_j²,

    E Σ|h_j|² = F·|G|² + n,     E|g|² = |G|² + n    ⇒
    n = (Σ|h_j|² - F|g|²) / (1 - F),   |G|² = |g|² - n.                                      (2)

For J equal pieces, F = 1/J and |g_b|² = J·Σ|h_j|² on average, and this is, with b = B/J,

    S = (|g_b|² - |g_B|²)/(1/b - 1/B),   |G|² = (B|g_B|² - b|g_b|²)/(B - b).

**Between prompts, between samples** (`nested_noise`). Sample s of prompt p contributes x_ps = G +
u_p + e_ps to the mean over K samples, with tr Cov(u) = P and tr Cov(e) = E. With c_p samples of
prompt p, a = Σ c_p²/K²,

    n = a·P + E/K,     or P/N + E/(N·M) for N prompts with M samples each.                       (3)

This is the analysis of variance of a nested design with unequal groups: with m_p the mean of a
prompt and m of all,

    E Σ_ps |x_ps - m_p|²   = (K - N)·E                                                           (4)
    E Σ_p c_p |m_p - m|²   = (N - 1)·E + (K - K·a)·P                                             (5)

(5): Cov(m_p) = P + E/c_p, Cov(m) = a·P + E/K, Cov(m_p, m) = (c_p·P + E)/K, summed with weights c_p.
Advantages r - mean(r) of a group make its x_ps depend on each other a little; both sides change by
the same factor 1 - 1/M, to first order.

**Advantages divided by the group's standard deviation** depend on each other more: for any rewards,
their squares have the same sum, so the mean m_p varies less than the scatter of its samples
suggests (simulated: E is 1.5 times too large). Its true variation shows by leaving out one sample
after the other; this divides the rest by another deviation σ_s (the jackknife: Efron and Stein
1981, "The jackknife estimate of variance"; the mean's own change is left out, as E ∇log π = 0).
Take the pseudo-values

    d_ps = σ/σ_s · (c_p·m_p - x_ps).                                                         (6)

Σ_ps |d_ps - d_p|² takes the place of (4), and is (4) for σ_s = σ.

σ/σ_s is 2 at most: beyond, one sample has most of the group's variance, and leaving it out says
nothing of small changes.

**Rewards of two values**, such as right and wrong (`within_of_two`): a few right answers have much
of the weight, and are similar, often the same text. Neither (4) nor (6) sees this. With k right
ones among c, q = k/c, and γ_1 and γ_0 the means of ∇log π over the right and over the wrong ones,
m_p = f(q)·(γ_1 - γ_0), with f(q) = √(q(1-q)), or q(1-q) for r - mean(r). It varies by the scatter
within both classes, and by the luck of k, a binomial number; groups without a signal have f = 0 and
are missing, so groups with a signal represent them:

    Var(m_p) = Σ_i (n_i/c)² tr Cov(x | class i)/n_i
               + Var f(k/c) / (P(0 < k < c)·f(q)²) · |E m_p|².                                   (7)

A class with one member has a known length, but no scatter of its own; it is assumed to have the
same ratio of scatter to length as in the other groups. In simulated groups of 8 and 16 with all
kinds of chances, (4) gives 1.0 to 1.6 times the truth, (6) 1.0 to 1.3, and (7) 0.8 to 1.1, mostly
0.97 to 1.02.

**Split groups.** If a prompt's samples lie in several pieces, these are not independent. By (3),
with A = Σ_j Σ_p c_jp²/K², E Σ|h_j|² = F|G|² + A·P + E/K, and (2) finds (A - F·a)/(1 - F)·P + E/K in
the place of n. `unsplit` corrects this.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.facts import NestedNoise, StepNoise


@dataclass(frozen=True)
class Noise:
    """Hold estimates of one step, each unbiased, so the signal may come out below 0: average before
    dividing.
    """

    noise: float
    """n = tr Cov(g), of the step's whole gradient; S is this times the number of examples."""
    signal: float
    """|G|²."""


def noise_of_pieces(
    squares: Sequence[float], shares: Sequence[float], whole: float
) -> Noise | None:
    """Solve (2). squares: |h_j|² of each piece; shares: f_j, with sum 1; whole: |g|². None for a
    single piece.
    """
    together = math.fsum(share * share for share in shares)
    if 1 - together < 1e-9:
        return None
    noise = (math.fsum(squares) - together * whole) / (1 - together)
    return Noise(noise, whole - noise)


def nested_noise(
    counts: Sequence[int], within: float, between: float, whole: float
) -> NestedNoise | None:
    """Solve (4) and (5). counts: c_p; within: Σ_ps |x_ps - m_p|²; between: Σ_p c_p |m_p - m|²;
    whole: |m|². None if a single prompt, or no prompt with two samples, leaves one of them unknown.
    """
    groups = len(counts)
    total = sum(counts)
    if groups < 2 or total == groups:
        return None
    share = sum(count * count for count in counts) / total**2
    samples = within / (total - groups)
    prompts = (between - (groups - 1) * samples) / (total - total * share)
    return NestedNoise(whole - share * prompts - samples / total, share * prompts, samples / total)


@dataclass(frozen=True)
class Alike:
    """Describe the samples of a prompt with the same reward."""

    count: float
    squares: float
    """Σ|x|²"""
    together: float
    """|Σx|²"""

    @property
    def scatter(self) -> float | None:
        """tr Cov(x), unbiased; None of one."""
        if self.count > 1:
            return (self.squares - self.together / self.count) / (self.count - 1)
        return None


def within_of_two(groups: Sequence[tuple[Alike, Alike, float]], unit: bool) -> float | None:
    """Estimate by (7) the value of (4) in `nested_noise`. groups: for each prompt the samples with
    the higher and those with the lower reward, possibly none, and |m_p|². unit: advantages are
    divided by the group's standard deviation. None if no two samples are alike.
    """
    shares: list[float | None] = []
    for side in range(2):
        members = [group[:2][side] for group in groups]
        known = [
            (one.scatter, one.squares / one.count) for one in members if one.scatter is not None
        ]
        of_all = math.fsum(length for _, length in known)
        shares.append(math.fsum(scatter for scatter, _ in known) / of_all if of_all > 0 else None)
    if shares == [None, None]:
        return None
    total = variances = 0.0
    for high, low, length in groups:
        count = high.count + low.count
        own = 0.0
        for one, share, other in ((high, shares[0], shares[1]), (low, shares[1], shares[0])):
            guess = (share if share is not None else other or 0.0) * one.squares
            own += one.count * (guess if one.scatter is None else one.scatter) / count**2
        total += count
        variances += count**2 * (
            own + _luck(round(high.count), round(count), unit) * max(length - own, 0.0)
        )
    return variances * (total - len(groups)) / total


@functools.cache
def _luck(right: int, count: int, unit: bool) -> float:
    """Return Var f(k/c) / (P(0 < k < c)·f(q)²)."""
    if right in (0, count):
        return 0.0
    q = right / count
    chances = [math.comb(count, k) * q**k * (1 - q) ** (count - k) for k in range(count + 1)]
    values = [math.pow(k * (count - k) / count**2, 0.5 if unit else 1.0) for k in range(count + 1)]
    first, second = (
        math.fsum(p * f**power for p, f in zip(chances, values, strict=True)) for power in (1, 2)
    )
    return (second - first**2) / math.fsum(chances[1:-1]) / values[right] ** 2


def unsplit(found: Noise, nested: NestedNoise, shares: Sequence[float], split: float) -> Noise:
    """Correct the result of `noise_of_pieces` for prompts in several pieces. split: A/a, 1 without
    any.
    """
    together = math.fsum(share * share for share in shares)
    prompts = max(nested.prompts, 0.0)
    samples = max(nested.samples, 0.0)
    if prompts + samples == 0:
        return found
    part = prompts / (prompts + samples)
    seen = 1 - part + part * (split - together) / (1 - together)
    if seen > 0.1:
        return Noise(found.noise / seen, found.signal + found.noise - found.noise / seen)
    return found


def step_noise(seen: Mapping[str, Any]) -> StepNoise:
    """Return the noise fields for a line of train.jsonl, from the records of
    `ttrl.training.step_noise`: prompts (1/a, their number if all have equally many samples),
    samples, pieces, seconds; noise n and signal |G|², over all parameters and by layers, for at
    least two pieces; nested, as seen by the sketch, if prompts have several samples.
    """
    counts = seen["counts"]
    shares = seen["shares"]
    total = sum(counts)
    within = None
    alike = seen.get("alike")
    if alike is not None:
        groups = [(Alike(*task[:3]), Alike(*task[3:6]), task[6]) for task in alike["tasks"]]
        within = within_of_two(groups, alike["unit"])
    nested = nested_noise(
        counts, seen["within"] if within is None else within, seen["between"], seen["mean"]
    )

    def found(squares: Sequence[float], whole: float) -> Noise | None:
        plain = noise_of_pieces(squares, shares, whole)
        if plain is None or nested is None:
            return plain
        return unsplit(plain, nested, shares, seen["split"])

    step = StepNoise(
        pieces=len(shares),
        samples=total,
        seconds=seen["seconds"],
        prompts=total**2 / sum(count * count for count in counts),
        nested=nested,
    )
    everything = found([math.fsum(piece) for piece in seen["squares"]], math.fsum(seen["whole"]))
    if everything is not None:
        layers = {}
        for group, name in enumerate(seen["layers"]):
            one = found([piece[group] for piece in seen["squares"]], seen["whole"][group])
            assert one is not None, "it depends on the shares, which are those of all layers"
            layers[name] = (one.noise, one.signal)
        step = step.replace(noise=everything.noise, signal=everything.signal, layers=layers)
    if all(math.isfinite(value) for value in _numbers(step.to_json())):
        return step
    return StepNoise(pieces=len(shares))


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [one for part in value for one in _numbers(part)]
    return [value]

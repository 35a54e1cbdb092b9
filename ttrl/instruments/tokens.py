"""Examine single tokens of a step: their effect on the entropy, and the reasons for differences of
sampler and trainer.

**Covariance.** A policy-gradient step on a softmax moves the entropy of its distributions by minus
the covariance of log π and A, to first order (arXiv 2505.22617): likely tokens with high advantages
and unlikely ones with low advantages lower it. A token's term is (log π - mean)·(A - mean), the
means over the step. A few tokens make most of the sum: Clip-Cov and KL-Cov act on these (objectives
"clip_cov" and "kl_cov"). `tokens_of_high_covariance` finds them in any step, whatever its
objective, and the study measures their part in the step's effect.

**Mismatch.** The difference d of trainer's and sampler's log-probability of a token is a sum,

    d = lag + rounding + rest
    lag       trainer's under the trained weights, minus trainer's under the sampler's weights
    rounding  trainer's in its training dtype, minus the same in a wider one
    rest      the remainder: the server's own rounding, of about the size of the trainer's, and
              any errors

so Cov(part, d)/Var(d) are shares with sum 1.

Shapes: N tokens of a step, in row-major order of its rows' labels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.data.packing.pack import IGNORE_LABEL, PackedTensors
from ttrl.training.objective.covariance import (
    clip_cov_choice,
    covariances,
    kl_cov_choice,
    token_keys,
)

CONTEXT = 12
"""Tokens shown before an outlier."""
_SHARES = (0.002, 0.02, 0.2)
"""Shares of a step's tokens, to see how few of them make most of its effect."""


def covariance_outliers(
    rows: PackedTensors, logprobs_N: Tensor, decode: Callable[[list[int]], str], count: int = 20
) -> Mapping[str, Any]:
    """Return "mean", the covariance of log π and A over the step's tokens; "share", the part of
    Σ|term| in the `count` largest; and "tokens", these with their text, by falling absolute value
    of the term.
    """
    trained = rows.labels != IGNORE_LABEL
    terms_N = covariances(logprobs_N, rows.advantages[trained])
    samples_N = rows.sample_ids[trained]
    labels_N = rows.labels[trained]
    places_N = rows.input_pos[trained]
    order = torch.argsort(terms_N.abs(), descending=True, stable=True)[:count].tolist()
    total = float(terms_N.abs().sum())
    tokens = []
    for token in order:
        own = torch.nonzero((samples_N == samples_N[token]) & (places_N < places_N[token])).squeeze(
            1
        )
        sample = rows.samples[int(samples_N[token])]
        tokens.append(
            {
                "task_id": sample.task_id,
                "sample": sample.sample,
                "position": int(places_N[token]) + 1 - sample.prompt_length,
                "before": decode(labels_N[own[-CONTEXT:]].tolist()),
                "text": decode([int(labels_N[token])]),
                "logprob": float(logprobs_N[token]),
                "advantage": float(rows.advantages[trained][token]),
                "covariance": float(terms_N[token]),
            }
        )
    if total:
        share = float(terms_N[order].abs().sum()) / total
    else:
        share = 0.0
    return {"mean": float(terms_N.mean()), "share": share, "tokens": tokens}


def tokens_of_high_covariance(
    rows: PackedTensors, logprobs_N: Tensor, config: ObjectiveConfig, seed: int
) -> dict[str, Tensor]:
    """Return a step's tokens of high covariance, bool [N] by name: the highest shares, and those of
    Clip-Cov with the run's settings, its candidates and its draw among them.

    seed: of the draw; the recipe's is its config's seed + the number of the step, from 0. Ratios,
    which exclude some candidates, are to the sampler's log-probabilities.
    """
    trained = rows.labels != IGNORE_LABEL
    advantages_N = rows.advantages[trained]
    sampled_N = rows.logprobs[trained]
    keys_N = token_keys(rows)[trained]
    chosen = {
        f"highest {100 * share:g}%": kl_cov_choice(logprobs_N, advantages_N, keys_N, share)
        for share in _SHARES
    }
    settings = dataclasses.replace(config, objective="clip_cov").policy_settings()
    everything = settings | {"covariance_share": 1.0}
    for name, how in (("Clip-Cov's candidates", everything), ("Clip-Cov's draw", settings)):
        chosen[name] = clip_cov_choice(logprobs_N, sampled_N, advantages_N, keys_N, seed, **how)
    return chosen


def mismatch(
    sampler_N: Tensor,
    trainer_N: Tensor,
    *,
    own_N: Tensor | None = None,
    exact_N: Tensor | None = None,
) -> dict[str, dict[str, float]]:
    """Split trainer - sampler into its parts; each with "mean" (of |part|), "rms" and "share".

    own: the trainer's under the sampler's weights, if these are others. exact: `trainer_N` in a
    wider dtype. An unknown part stays in the rest. Tokens without a sampler log-probability are
    left out; without any tokens the result is empty.
    """
    known = torch.isfinite(sampler_N) & torch.isfinite(trainer_N)
    if not known.any():
        return {}
    sampler = sampler_N[known].double()
    trainer = trainer_N[known].double()
    parts = {}
    if own_N is not None:
        parts["lag"] = trainer - own_N[known].double()
    if exact_N is not None:
        parts["rounding"] = trainer - exact_N[known].double()
    whole = trainer - sampler
    parts["rest"] = whole - sum(parts.values(), torch.zeros_like(whole))
    variance = float((whole - whole.mean()).square().sum())
    found = {}
    for name, part in {"whole": whole, **parts}.items():
        covariance = float(((part - part.mean()) * (whole - whole.mean())).sum())
        found[name] = {"mean": float(part.abs().mean()), "rms": float(part.square().mean().sqrt())}
        found[name] |= {"share": covariance / variance} if variance else {}
    return found


def outliers_text(found: Mapping[str, Any], count: int = 8) -> list[str]:
    """Return lines about the outliers, for a terminal."""
    tokens: Sequence[Mapping[str, Any]] = found["tokens"]
    lines = [
        f"Cov(log π, A) = {found['mean']:.4g}: above 0, the step lowers the entropy of single "
        f"tokens; {len(tokens)} tokens make up {found['share']:.0%} of the terms:"
    ]
    for one in tokens[:count]:
        lines.append(
            f"{one['covariance']:>9.3g}  log π {one['logprob']:>7.3f}  A "
            f"{one['advantage']:>6.2f}  {one['task_id']} "
            f"{one['sample']}: {one['before']!r} → {one['text']!r}"
        )
    return lines


def parts_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Describe the tokens' parts in a step's effect, `split_row`'s "tokens"."""
    whole, *some = parts
    told = ", ".join(f"{one['name']} ({one['tokens']:,}) {one['effect']:.3g}" for one in some)
    return (
        f"Of {whole['effect']:.4g} nats by this step's gradient, its tokens of high covariance "
        f"(of {whole['tokens']:,}) give: {told}"
    )

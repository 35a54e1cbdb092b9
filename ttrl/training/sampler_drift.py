"""Measure the drift between sampler and trainer log-probabilities of the same tokens, before
training.

In exact arithmetic, tokens of the starting policy show no difference. Any difference comes from
rounding (and is small), or from an error: other weights, another distribution, another model.
Tokens of older policies differ by policy lag, not by error: figures are kept by weights version. If
an older policy sampled all tokens, some rows are also compared under its own weights (`Prepass`).

`trainer_logprobs.safetensors`, next to train.jsonl, holds the trainer's numbers in the pack's
places, for the report.

Shapes: N trained positions over all steps and ranks, P rows of the pack, T positions of a row.
"""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.configs.recipe import PROGRESS_VARIABLE
from ttrl.facts import Difference, SamplerTrainer, WorstPlace, part_of
from ttrl.system.files import atomic_file
from ttrl.training.batches import Update
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.parallel.distributed import Ranks

logger = logging.getLogger(__name__)

LOGPROBS_FILE = "trainer_logprobs.safetensors"
WORST = 8
"""How many tokens are named for each weights version."""
TOLERANCES = {"fp32": 1e-3, "bf16": 0.25}
"""A token's tolerated difference in nats, by the trainer's dtype. In float32 differences are about
1e-6, with TF32 in a GPU's attention kernels up to 1e-3; in bfloat16 logits of size 10 to 20 are
rounded by 0.03 to 0.06 on both sides.
"""


def compare_tokens(
    steps: Sequence[Update],
    logprobs: Tensor,
    sampled: Tensor,
    packed_shape: Sequence[int],
    config: GRPOConfig,
    here: Ranks,
    *,
    write: bool = True,
) -> SamplerTrainer:
    """Compare sampler and trainer on the trained tokens of `steps`, this rank's parts of the
    optimizer steps, for train.jsonl.

    logprobs, sampled: [N] of this rank, of the trained tokens of these rows in row-major order.
    packed_shape: [P, T]. A collective; with `write` the first rank writes LOGPROBS_FILE into
    `config.output_dir`.

    Returns, if any token has a log-probability from the sampler,
        mean, p999, max     of |difference| in nats
        ess                 effective sample size (Σw)²/Σw² of the weights w = π_trainer/π_sampler,
                            as a share of the tokens
        ess_of_most         the same without the most distant thousandth of the tokens: a single one
                            with a weight of e³ halves that of a thousand tokens
        tokens, unknown     compared tokens, and tokens without a sampler's log-probability
        not_finite          tokens with a non-finite number on either side; excluded from all else
        tolerance, outside  nats, and the share of tokens beyond it
        by_version          the difference by the tokens' weights version
        by_position         mean |difference| of the first, second, third and last quarter of all
                            positions in the samples: growth with the position points to positions
                            (RoPE), not to weights
        worst               the WORST most distant tokens of each version
    """
    mine = [_facts(step) for step in steps]
    places, versions, positions = (
        here.gather(torch.cat([facts[i] for facts in mine])) for i in range(3)
    )
    logprobs, sampled = (
        here.gather(values.detach()).float().cpu() for values in (logprobs, sampled)
    )
    assert len(places) == len(logprobs) == len(sampled)
    if config.drift_tolerance is not None:
        tolerance = config.drift_tolerance
    else:
        tolerance = TOLERANCES[config.dtype]
    if write and here.is_first:
        _save(Path(config.output_dir), places, logprobs, packed_shape)
    known = ~torch.isnan(sampled)
    finite = known & torch.isfinite(sampled) & torch.isfinite(logprobs)
    result = _figures(logprobs, sampled, known, finite, tolerance)
    if not known.any():
        return result
    gap = (logprobs.double() - sampled.double()).abs()
    gap[~finite] = math.inf
    by_version: dict[str, Difference] = {}
    worst: list[WorstPlace] = []
    for version in versions[known].unique().tolist():
        chosen = known & (versions == version)
        figures = result
        if int(chosen.sum()) < int(known.sum()):
            figures = _figures(logprobs, sampled, chosen, chosen & finite, tolerance)
        by_version[str(version)] = part_of(Difference, figures)
        candidates = chosen.nonzero().squeeze(1)
        furthest = candidates[gap[candidates].topk(min(WORST, len(candidates))).indices].tolist()
        for i in sorted(furthest, key=lambda i: (-float(gap[i]), int(places[i]))):
            row, position = divmod(int(places[i]), packed_shape[1])
            both = _number(logprobs[i]), _number(sampled[i])
            worst.append(WorstPlace(row, position, version, *both))
    by_position = _by_position(gap[finite], positions[finite])
    return result.replace(by_version=by_version, worst=worst, by_position=by_position)


def warn_of_drift(found: SamplerTrainer, config: GRPOConfig, here: Ranks) -> None:
    """Warn if sampler and trainer differ by more than a run allows, and this recipe is no part of a
    run: a run judges its drift itself.
    """
    if PROGRESS_VARIABLE in os.environ or not here.is_first:
        return
    # Here: a run's trainer does not need it.
    from ttrl.monitoring.drift import exceeded, judged_figures, limits

    if found.own.tokens:
        found = found.replace(by_version=None)
    newest = max(map(int, found.by_version or {}), default=0)
    judged = judged_figures(found, newest, config.to_dict())
    if judged is None:
        return
    beyond = exceeded(judged.figures, limits(config.dtype, here.device.type))
    if beyond:
        logger.warning(
            "the log-probabilities of sampler and trainer differ: %s; over %s tokens of policy %d "
            "in %s. Likely causes: another temperature (the recipe's is %g; set `temperature` to "
            "the sampler's), or other weights than those of %s (an earlier or later checkpoint, "
            "another dtype or quantization); sample again with this model",
            "; ".join(beyond),
            f"{judged.figures.tokens or 0:,}",
            judged.version,
            config.packed,
            config.temperature,
            config.model,
        )


def _facts(step: Update) -> tuple[Tensor, Tensor, Tensor]:
    """Return place in the pack (row·T + position), version, position in the sample of this rank's
    trained tokens, row-major.
    """
    trained = step.rows.labels != IGNORE
    row, position = trained.nonzero(as_tuple=True)
    numbers = torch.tensor(step.numbers, dtype=torch.int64)[row]
    return (
        numbers * step.rows.seq_len + position,
        step.rows.weights_version[trained].long(),
        step.rows.input_pos[trained],
    )


def _figures(
    logprobs: Tensor, sampled: Tensor, known: Tensor, finite: Tensor, tolerance: float
) -> SamplerTrainer:
    found = SamplerTrainer(
        tokens=int(finite.sum()),
        unknown=int((~known).sum()) if len(known) == len(logprobs) else 0,
        not_finite=int(known.sum() - finite.sum()),
    )
    if not found.tokens:
        return found
    difference = logprobs[finite].double() - sampled[finite].double()
    apart = difference.abs()
    nearest = apart.argsort()[: len(apart) - len(apart) // 1000]
    rank = math.ceil(0.999 * len(apart)) - 1
    return found.replace(
        mean=float(apart.mean()),
        p999=float(apart.kthvalue(rank + 1).values),
        max=float(apart.max()),
        ess=_effective_size(difference),
        ess_of_most=_effective_size(difference[nearest]),
        tolerance=tolerance,
        outside=float((apart > tolerance).double().mean()),
    )


def _effective_size(difference: Tensor) -> float:
    w = torch.exp(difference - difference.max())  # the scale cancels in the ratio
    return float(w.sum() ** 2 / (w**2).sum() / len(w))


def _by_position(gap: Tensor, positions: Tensor) -> list[float]:
    """Return means of |difference| over quarters of the tokens, by position; fewer if there are
    fewer tokens.
    """
    by_place = gap[positions.argsort(stable=True)]
    return [float(part.mean()) for part in by_place.tensor_split(4) if len(part)]


def _number(value: Tensor) -> float | None:
    if math.isfinite(float(value)):
        return float(value)
    return None


def _save(folder: Path, places: Tensor, logprobs: Tensor, shape: Sequence[int]) -> None:
    whole = torch.full(tuple(shape), torch.nan)
    whole.view(-1)[places] = logprobs
    with atomic_file(folder / LOGPROBS_FILE) as temporary:
        save_file({"logprobs": whole}, temporary)

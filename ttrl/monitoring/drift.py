"""Whether sampler and trainer are the same model: every iteration's difference of their
log-probabilities, held to limits.

The recipe measures it before its first step (`ttrl.training.drift`). Only tokens of the policy that
training starts from are judged: those of older policies differ because the policy has moved since,
which is what importance ratios are for. Where it sampled none (one step off policy), tokens of the
policy that sampled are judged under its own weights, in some of the rows. Where a limit is
exceeded, the likely causes are checked (`ttrl.monitoring.drift_causes`), everything is written to
drift.json in the iteration's folder, and the run ends with DriftError, or warns and goes on
(`TrainConfig.drift`).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrl.configs.run import LIMIT_NAMES
from ttrl.errors import DriftError, ServerError, TtrlError
from ttrl.facts import ComparedTokens, Difference, SamplerTrainer, TrainFacts
from ttrl.monitoring.drift_report import DriftReport
from ttrl.run_folder.folder import DRIFT_FILE, REDO_VARIABLE, RunFolder
from ttrl.system.console import Console
from ttrl.system.files import write_json

if TYPE_CHECKING:
    from ttrl.configs.run import TrainConfig

ENOUGH_TOKENS = 1000
"""With fewer, only the mean is judged: the 99.9th percentile would be the largest of all."""
FEWEST_TOKENS = 100
"""A mean over fewer counts as if it were over this many, the missing ones without a difference: in
bfloat16 it is not unusual that a single token is a nat apart, and with `tokens_per_iteration` the
newest policy may have sampled only a handful.
"""
_WORDS = {
    "mean": "mean |difference of log-probabilities|",
    "p999": "99.9th percentile of it",
    "ess": "effective sample size",
    "outside": "share of tokens outside the tolerance",
}


@dataclass(frozen=True)
class DriftLimits:
    """How far apart sampler and trainer may be. None: no limit."""

    mean: float | None
    """Nats; above it is too far, as with `p999`."""
    p999: float | None
    ess: float | None
    """(Σw)²/Σw²/N of w = π_trainer/π_sampler, without the furthest thousandth of the tokens; below
    it is too far.
    """
    outside: float | None
    """Share of tokens further apart than the recipe's `drift_tolerance`."""


# float32 on CPU: measured 2e-7 to 1e-6 on average for tiny models and 8e-6 for SmolLM2-135M (99.9th
# percentile: 1e-5 and 4e-5); one optimizer step at a learning rate of 1e-4 moves more than 1e-3,
# another temperature or other weights far more. The limits lie 25 times above the largest of the
# former and below the latter. On CUDA attention kernels multiply float32 in TF32 (10 bits of
# mantissa), which is good to about 1e-3. bfloat16 (8 bits): reports of vLLM against a trainer name
# means of 0.005 to 0.03 nats and single tokens that are 1 nat apart, more for mixtures of experts,
# where a rounding can send a token to another expert. What these see is a wrong distribution or
# model, not a policy that is one small step old: that is what the canary after each sync is for.
# Both half-precision and CUDA limits come from reading, not from runs of ours with a real model: a
# tiny one kept them on an H100.
DEFAULT_LIMITS = {
    ("fp32", "cpu"): DriftLimits(mean=2e-4, p999=5e-3, ess=0.99, outside=0.005),
    ("fp32", "cuda"): DriftLimits(mean=2e-3, p999=5e-2, ess=0.98, outside=0.05),
    ("bf16", "cpu"): DriftLimits(mean=0.06, p999=1.0, ess=0.9, outside=0.04),
    ("bf16", "cuda"): DriftLimits(mean=0.06, p999=1.0, ess=0.9, outside=0.04),
}


def limits(
    dtype: str | None, device: str | None, changes: Mapping[str, Any] | None = None
) -> DriftLimits:
    """Return the defaults for a dtype and device (float32 on CPU where unknown), with the changes
    of `drift_limits`.
    """
    kind = "bf16" if dtype == "bf16" else "fp32", "cuda" if device == "cuda" else "cpu"
    given = {name: (changes or {})[name] for name in LIMIT_NAMES if name in (changes or {})}
    return DriftLimits(**(asdict(DEFAULT_LIMITS[kind]) | given))


def limits_of(config: "TrainConfig") -> DriftLimits:
    return limits(config.dtype, config.device, config.drift_limits)


def exceeded(figures: Difference, limits: DriftLimits) -> list[str]:
    """Say which figures of one weights version are beyond their limits, with both numbers; empty
    where none is.
    """
    found = []
    if figures.not_finite:
        found.append(
            f"{figures.not_finite} tokens for which one of the two has no finite log-probability"
        )
    tokens = figures.tokens or 0
    names = LIMIT_NAMES if tokens >= ENOUGH_TOKENS else ("mean",)
    for name in names:
        value = getattr(figures, name)
        if name == "ess" and figures.ess_of_most is not None:
            value = figures.ess_of_most
        limit = getattr(limits, name)
        if value is None or limit is None:
            continue
        if (
            name == "mean"
            and 0 < tokens < FEWEST_TOKENS
            and value * tokens / FEWEST_TOKENS <= limit
        ):
            continue
        if value < limit if name == "ess" else value > limit:
            found.append(f"{_WORDS[name]} {value:.3g} (limit {limit:g})")
    return found


class Judged(NamedTuple):
    """The figures that are held to the limits."""

    version: int
    """The policy that sampled the tokens, and under whose weights they were compared."""
    figures: Difference
    source: ComparedTokens
    """The entry that holds `worst` and `by_position` of these tokens."""


def judged_figures(
    drift: SamplerTrainer, version: int, training: Mapping[str, Any]
) -> Judged | None:
    """Return the figures of the tokens that policy `version` sampled, from which training starts;
    where there are none, those that were compared under the weights of the older policy that
    sampled them; else None. Not judged: figures of older run folders, which are not kept by
    version, and a base in 4 bits (`training`: the recipe's settings) while the server has the
    starting model, which nobody has rounded.
    """
    judged = None
    own = drift.own_weights
    figures = (drift.by_version or {}).get(str(version))
    if figures is not None:
        judged = Judged(version, figures, drift)
    elif own is not None and own.tokens and own.version is not None:
        judged = Judged(own.version, own, own)
    if judged is None or (judged.version == 0 and training.get("lora_base_dtype") == "nf4"):
        return None
    return judged


def check_drift(
    config: "TrainConfig",
    folder: RunFolder,
    number: int,
    console: Console,
    ask_server: Callable[[str], Any] | None = None,
    compared: SamplerTrainer | None = None,
) -> DriftReport | None:
    """Judge iteration `number`, whose train phase is done, or nothing but its files are missing.

    compared: what its first step says of sampler and trainer, where there is no marker yet.
    ask_server: a function that GETs a path of the running server and returns the JSON answer; None
        where no server runs.

    Returns None where everything is within the limits or nothing could be judged, else what
    drift.json holds; raises DriftError instead where `config.drift` is "stop".
    """
    marker = folder.iteration(number).marker(TrainFacts) or TrainFacts()
    steps = marker.taken()
    if steps:
        compared = steps[0].sampler_trainer
    judged = judged_figures(
        compared or SamplerTrainer(), folder.policy_version(number - 1), config.recipe_settings
    )
    path = folder.iteration(number).path / DRIFT_FILE
    if judged is None or not (beyond := exceeded(judged.figures, limits_of(config))):
        # Of an earlier start, with other limits: the report would go on showing it.
        path.unlink(missing_ok=True)
        return None
    version, figures, source = judged
    # Loads torch and the pack, which a run without drift need not pay for.
    from ttrl.monitoring.drift_causes import gather_evidence, likely_causes, worst_tokens

    try:
        tokens = worst_tokens(folder, number, source, version)
    except (TtrlError, OSError, ValueError, KeyError, IndexError) as error:
        tokens = []
        unread = f"  (they cannot be shown: {type(error).__name__}: {error})"
    else:
        unread = ""
    causes = likely_causes(
        gather_evidence(config, folder, number, source, version, tokens, _server_info(ask_server))
    )
    if isinstance(figures, ComparedTokens):
        figures = figures.replace(worst=None)
    report = DriftReport(
        iteration=number,
        version=version,
        exceeded=beyond,
        figures=figures,
        worst=tokens,
        causes=causes,
    )
    write_json(path, report.to_json())
    lines = [
        f"iteration {number}: sampler and trainer do not compute the same: {'; '.join(beyond)}; "
        f"over {figures.tokens or 0:,} "
        f"tokens that policy {version} sampled",
        "The tokens that are furthest apart (natural log-probabilities):",
        *([token.line() for token in tokens] or [unread or "  (none were kept)"]),
        "Likely causes, checked:",
        *(cause.line() for cause in causes),
    ]
    if config.drift == "stop":
        lines += [
            f"What iteration {number} sampled and trained is of no use. Remove the cause, and "
            "start the same command again with "
            f"{REDO_VARIABLE}={number} in front of it, or as train(..., redo={number}): that "
            f"throws away {path.parent} and all "
            'after it, and does them again. If this difference is expected here: drift="warn", '
            "or higher drift_limits; both may "
            "be changed for a run that goes on",
        ]
        raise DriftError("\n".join(lines))
    for line in lines:
        console.line(line)
    return report


def _server_info(ask: Callable[[str], Any] | None) -> dict[str, Any] | None:
    """Ask vLLM how it runs; None where it does not say."""
    if ask is None:
        return None
    try:
        answer = ask("/server_info?config_format=json")
    except (ServerError, OSError):
        return None
    if isinstance(answer, dict):
        config = answer.get("vllm_config")
    else:
        config = None
    if isinstance(config, dict):
        return config
    return None

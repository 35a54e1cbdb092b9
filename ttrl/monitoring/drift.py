"""Check that sampler and trainer are the same model: hold the difference of their log-probabilities
to limits in every iteration.

The recipe measures the difference before its first step (`ttrl.training.sampler_drift`). Only
tokens of training's starting policy are judged. Tokens of older policies differ because the policy
has moved since; importance ratios correct for this move. If the starting policy sampled nothing
(one step off policy), tokens in some rows are judged under the weights of the sampling policy.
Beyond a limit, `ttrl.monitoring.drift_causes` checks the likely causes and drift.json in the
iteration's folder records everything. The run then ends with DriftError, or warns and continues
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
"""With fewer, only the mean is judged: the 99.9th percentile would be the maximum."""
FEWEST_TOKENS = 100
"""A mean over fewer tokens counts as one over this many, the missing ones at zero difference. In
bfloat16 a difference of one nat on a single token is not unusual, and with `tokens_per_iteration`
the newest policy may have sampled only a handful.
"""
_WORDS = {
    "mean": "mean |difference of log-probabilities|",
    "p999": "its 99.9th percentile",
    "ess": "effective sample size",
    "outside": "share of tokens outside the tolerance",
}


@dataclass(frozen=True)
class DriftLimits:
    """Limits for the distance between sampler and trainer. None: no limit."""

    mean: float | None
    """Highest allowed value in nats, like `p999`."""
    p999: float | None
    ess: float | None
    """Lowest allowed (Σw)²/Σw²/N of w = π_trainer/π_sampler, without the furthest thousandth of the
    tokens.
    """
    outside: float | None
    """Highest allowed share of tokens beyond the recipe's `drift_tolerance`."""


# float32 on CPU: means of 2e-7 to 1e-6 measured for tiny models and 8e-6 for SmolLM2-135M (99.9th
# percentile: 1e-5 and 4e-5). One optimizer step at a learning rate of 1e-4 moves more than 1e-3,
# another temperature or other weights far more. The limits lie 25 times above the largest measured
# difference and below such a step. On CUDA, attention kernels multiply float32 in TF32 (10 bits of
# mantissa), good to about 1e-3. bfloat16 (8 bits): reports of vLLM against a trainer name means of
# 0.005 to 0.03 nats and single tokens 1 nat apart. Mixtures of experts reach more: rounding can
# send a token to another expert. These limits catch a wrong distribution or model. The canary after
# each sync catches a policy one small step old. The half-precision and CUDA limits come from
# reading, not from our own runs with a real model; a tiny model kept them on an H100.
_BF16 = DriftLimits(mean=0.06, p999=1.0, ess=0.9, outside=0.04)
DEFAULT_LIMITS = {
    ("fp32", "cpu"): DriftLimits(mean=2e-4, p999=5e-3, ess=0.99, outside=0.005),
    ("fp32", "cuda"): DriftLimits(mean=2e-3, p999=5e-2, ess=0.98, outside=0.05),
    ("bf16", "cpu"): _BF16,
    ("bf16", "cuda"): _BF16,
}


def limits(
    dtype: str | None, device: str | None, changes: Mapping[str, Any] | None = None
) -> DriftLimits:
    """Return the defaults for a dtype and device with the changes of `drift_limits`. An unknown
    dtype or device counts as float32 or CPU.
    """
    kind = "bf16" if dtype == "bf16" else "fp32", "cuda" if device == "cuda" else "cpu"
    given = {name: (changes or {})[name] for name in LIMIT_NAMES if name in (changes or {})}
    return DriftLimits(**(asdict(DEFAULT_LIMITS[kind]) | given))


def limits_of(config: "TrainConfig") -> DriftLimits:
    return limits(config.dtype, config.device, config.drift_limits)


def exceeded(figures: Difference, limits: DriftLimits) -> list[str]:
    """Name the figures of one weights version beyond their limits, with both numbers."""
    found = []
    if figures.not_finite:
        found.append(
            f"{figures.not_finite} tokens without a finite log-probability in sampler or trainer"
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
    """The figures to hold to the limits."""

    version: int
    """The sampling policy; the comparison used its weights."""
    figures: Difference
    source: ComparedTokens
    """The entry with `worst` and `by_position` of these tokens."""


def judged_figures(
    drift: SamplerTrainer, version: int, training: Mapping[str, Any]
) -> Judged | None:
    """Return the figures of tokens from policy `version`, training's starting policy.

    Without such tokens, return those of an older policy compared under its own weights; else None.
    Two cases are not judged: older run folders, without figures by version, and a 4-bit base
    (`training`: the recipe's settings) while the server holds the starting model, still unrounded.
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
    """Judge iteration `number` after its train phase, or with only its files missing.

    compared: the first step's sampler-trainer figures, before there is a marker.
    ask_server: a function to GET a path of the running server and return the JSON answer; None
        without a server.

    Returns the content of drift.json, or None if all is within the limits or nothing could be
    judged. Raises DriftError instead if `config.drift` is "stop".
    """
    marker = folder.iteration(number).marker(TrainFacts) or TrainFacts()
    steps = marker.taken()
    if steps:
        compared = steps[0].sampler_trainer
    judged = judged_figures(
        compared or SamplerTrainer(), folder.policy_version(number - 1), config.recipe_settings
    )
    path = folder.iteration(number).path / DRIFT_FILE
    beyond = [] if judged is None else exceeded(judged.figures, limits_of(config))
    if judged is None or not beyond:
        # Left by an earlier start with other limits; the report would still show it.
        path.unlink(missing_ok=True)
        return None
    version, figures, source = judged
    # Loads torch and the pack; a run without drift need not pay for them.
    from ttrl.monitoring.drift_causes import gather_evidence, likely_causes, worst_tokens

    try:
        tokens = worst_tokens(folder, number, source, version)
    except (TtrlError, OSError, ValueError, KeyError, IndexError) as error:
        tokens = []
        unread = f"  (not available: {type(error).__name__}: {error})"
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
        f"iteration {number}: the log-probabilities of sampler and trainer differ: "
        f"{'; '.join(beyond)}; over {figures.tokens or 0:,} tokens of policy {version}",
        "The worst tokens (natural log-probabilities):",
        *([token.line() for token in tokens] or [unread or "  (none stored)"]),
        "Likely causes, checked:",
        *(cause.line() for cause in causes),
    ]
    if config.drift == "stop":
        lines += [
            f"Discard what iteration {number} sampled and trained. Remove the cause, then start "
            f"the same command with {REDO_VARIABLE}={number} in front of it, or pass train(..., "
            f"redo={number}): both delete {path.parent} and all later iterations, and repeat them. "
            'If you expect this difference, set drift="warn" or raise drift_limits; you may '
            "change either in a running experiment",
        ]
        raise DriftError("\n".join(lines))
    for line in lines:
        console.line(line)
    return report


def _server_info(ask: Callable[[str], Any] | None) -> Mapping[str, Any] | None:
    """Ask vLLM for its configuration; None without an answer."""
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

"""The plain nouns that pass between the rooms of the house: dataclasses of Python types, nothing heavier.

Sample           one completion of one task, graded or failed     written to rollouts.jsonl
TaskResult       the samples of one task: a group
TokenizedResult  a sample as one token sequence, ready to be packed
"""

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _null_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(kw_only=True)
class Sample:
    """One completion. `token_ids` and `logprobs` run over the completion alone and have the same length where both are known."""

    task_id: str
    sample: int
    """Its number within the task, from 0."""
    messages: list[dict[str, Any]]
    """The prompt as chat messages."""
    text: str = ""
    """What the model answered (the message's content)."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """The server's own ids, the sampled end-of-turn token included; None where the server gave none."""
    logprobs: list[float] | None = None
    """Natural log-probabilities under the sampler, temperature and top-p/k included; NaN where unknown."""
    finish_reason: str | None = None
    """"stop", "length", "tool_calls", … as the server said; "stopped_early" where `on_chunk` ended the stream; "unfinished" where
    a token budget ran out: such a sample has neither reward nor error, and is continued later."""
    reward: float | None = None
    """None where `error` says why there is none."""
    metrics: dict[str, float] = field(default_factory=dict)
    weights_version: int = -1
    """The iteration whose checkpoint sampled it (0: the starting model); -1 where unknown."""
    token_versions: list[int] | None = None
    """The weights version of every completion token, where a sample was continued under other weights; None: the same for all."""
    cached: bool = False
    """True where the completion came from the cache."""
    error: str | None = None
    """Why the sample or its grade failed: exception type, message and, for graders, the traceback."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write as it is: unknown logprobs become null. It shares the messages with the sample."""
        # Not dataclasses.asdict, which copies every token id by itself: that took longer than all else that is done to a sample.
        row = {f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if self.logprobs is not None:
            row["logprobs"] = [_null_if_nan(logprob) for logprob in self.logprobs]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Sample":
        """The inverse of `to_json`; keys of later versions are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in row.items() if key in known}
        if values.get("logprobs") is not None:
            values["logprobs"] = [math.nan if logprob is None else logprob for logprob in values["logprobs"]]
        return cls(**values)


@dataclass(kw_only=True)
class TaskResult:
    """The samples of one task, in order of their numbers, failed ones included."""

    task_id: str
    messages: list[dict[str, Any]]
    samples: list[Sample]

    @property
    def graded(self) -> list[Sample]:
        """The samples that have a reward."""
        return [sample for sample in self.samples if sample.reward is not None]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the graded samples."""
        return [sample.reward for sample in self.samples if sample.reward is not None]


@dataclass(kw_only=True)
class TokenizedResult:
    """One sample as one sequence: prompt, then completion. All lists have one entry per token and describe *that* token.

    (Packing moves labels, logprobs, advantages and masks to the position that predicts the token; nothing here is shifted.)
    """

    task_id: str
    sample: int
    token_ids: list[int]
    tokens: list[str] | None = None
    """The tokens as text, for people; None where no tokenizer was at hand."""
    assistant_mask: list[bool]
    """True for tokens that the model generated."""
    input_pos: list[int]
    """0, 1, 2, …"""
    logprobs: list[float]
    """The sampler's, NaN for the prompt and where unknown."""
    prompt_length: int
    reward: float
    advantage: float
    token_advantages: list[float] | None = None
    """One per completion token, from `prompt_length` on, instead of `advantage`: of a value head, or of implicit rewards
    (`ttrl.data.token_advantages`); None: all `advantage`."""
    weights_version: int = -1
    token_versions: list[int] | None = None
    """As in Sample: one per completion token, from `prompt_length` on; None: all `weights_version`."""
    finish_reason: str | None = None

"""The plain nouns that pass between the rooms of the house: dataclasses of Python types, nothing
heavier.

Sample           one completion of one task, graded or failed     written to rollouts.jsonl
Turn             one reply within a sample of several
TaskResult       the samples of one task: a group
Prepared         what a rollout worker made of a group, for files and packing
TokenizedResult  a sample (or a part of one) as one token sequence, ready to be packed
Endpoint         where a server of ours is asked
"""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrl.messages import Message, Tool

CANARY_FILE = "canary.json"
"""In a checkpoint: log-probabilities of a fixed text, which a server must reproduce
(`ttrl.weights.canary`).
"""
ADAPTER_FOLDER = "adapter"
"""In a checkpoint: what is trained beside a frozen base (`ttrl.training.policy.adapters`)."""
ADAPTER_SETTINGS = "ttrl_adapter.json"
"""In that folder: which base it belongs to, and how."""
PROMPT = "prompt"
"""The role of a message that is the whole prompt, as text or token ids: the model goes on with it,
without a chat template.
"""
LARGEST_REWARD = 1e12
"""Of either sign. Larger ones leave float32 once they are squared and summed over a model's
parameters: the gradient's norm would be infinite, and the clipped gradient 0."""
ANSWER_END = "answer_end"
"""A metric in which graders say where the last answer ends, in characters of the reply's content,
for `surprise_until`.
"""


def raw_prompt(messages: Sequence[Mapping[str, Any]]) -> str | list[int] | None:
    """Return the text or the ids of a prompt that no chat template makes; None for a chat."""
    if len(messages) != 1 or messages[0].get("role") != PROMPT:
        return None
    content: str | list[int] = messages[0]["content"]
    return content


def tokens_before(marked: Sequence[int], plain: Sequence[int]) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text, such as `<bos>`.

    marked, plain: the ids of a text with and without special tokens. Some tokenizers also put one
    behind it.
    """
    for start in range(len(marked) - len(plain), 0, -1):
        if list(marked[start : start + len(plain)]) == list(plain):
            return list(marked[:start])
    return []


@dataclass(kw_only=True)
class Turn:
    """One reply of the model within a sample of several turns (those of a task's `rollout`).

    Its tokens are `num_tokens` of the sample's `token_ids` and `logprobs`, behind those of the
    turns before it. Of what was sent, only what is new is kept, as conversations repeat themselves.
    """

    messages: list[Message]
    """The messages sent beyond the conversation of `follows`; all of them where that is None."""
    follows: int | None = None
    """The turn whose messages and reply were sent again before `messages`, from 0; -1: the task's
    messages.
    """
    reply: Message = field(default_factory=dict)
    """The assistant's message as it is sent back to the server: content, tool calls, reasoning."""
    tools: list[Tool] | None = None
    """The tools that were sent with this request by the rollout."""
    prompt_token_ids: list[int] | None = None
    """The server's own ids of the prompt, beyond the tokens of `continues`; all of them where that
    is None.
    """
    continues: int | None = None
    """The turn whose prompt and generated tokens this prompt begins with, id by id. None for a
    first turn, and where the chat template renders earlier turns in another way than they were
    generated (without their reasoning, in other tokens).
    """
    num_tokens: int = 0
    """Tokens that the model generated."""
    finish_reason: str | None = None
    weights_version: int = -1
    cached: bool = False
    """True where the reply came from the cache."""
    prefix_cached: int | None = None
    """As in Sample, of this reply's whole prompt."""
    routed_experts: str | None = None
    """As in Sample, of this reply and its whole prompt."""


@dataclass(kw_only=True)
class Sample:
    """One completion. `token_ids` and `logprobs` run over what the model generated and have the
    same length where both are known.

    With `turns`, that is what it generated in all of them, one after another; text and finish
    reason are the last turn's, and `prompt_token_ids` the first one's.
    """

    task_id: str
    sample: int
    """Its number within the task, from 0."""
    messages: list[Message]
    """The prompt as chat messages."""
    text: str = ""
    """What the model answered (the message's content)."""
    opening: str = ""
    """The part of its turn before that, which the prompt or the server holds
    (`ttrl.rollouts.client.opening`).
    """
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """The server's own ids, the sampled end-of-turn token included; None where the server gave
    none.
    """
    logprobs: list[float] | None = None
    """Natural log-probabilities under the sampler, temperature and top-p/k included; NaN where
    unknown.
    """
    finish_reason: str | None = None
    """"stop", "length", "tool_calls", … as the server said; "stopped_early" where `on_chunk` ended
    the stream; "unfinished" where a token budget ran out: such a sample has neither reward nor
    error, and is continued later.
    """
    reward: float | None = None
    """None where `error` says why there is none."""
    metrics: dict[str, float] = field(default_factory=dict)
    weights_version: int = -1
    """The iteration whose checkpoint sampled it (0: the starting model); -1 where unknown."""
    token_versions: list[int] | None = None
    """The weights version of every completion token, where a sample was continued under other
    weights; None: the same for all.
    """
    cached: bool = False
    """True where the completion came from the cache; with several turns, all of them."""
    prefix_cached: int | None = None
    """Of the prompt's tokens, those that the server's prefix cache knew when it was last asked; of
    samples that one request asked for, the server says it of one of them alone. None where it did
    not say.
    """
    error: str | None = None
    """Why the sample or its grade failed: exception type, message and, for graders, the traceback.
    """
    logprob_tokens: list[str] | None = None
    """Where the server gave log-probabilities and no ids: the bytes of each one's token, as Latin-1
    text.
    """
    routed_experts: str | None = None
    """The experts that vLLM chose for all tokens but the last: `.npy` in base64, [tokens - 1,
    layers, experts per token]. None where `router_replay` is off or the completion was cut off."""
    turns: list[Turn] | None = None
    """The model's replies, where a rollout asked for them; None for a single answer to `messages`.
    """

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"task {self.task_id!r}, sample {self.sample}"

    @property
    def scores(self) -> dict[str, float]:
        """Return the metrics that have a mean: all but ANSWER_END."""
        return {name: value for name, value in self.metrics.items() if name != ANSWER_END}

    def to_json(self) -> dict[str, Any]:
        """Return what `json` can write as it is: unknown logprobs become null. It shares the
        messages with the sample.
        """
        # Not dataclasses.asdict, which copies every token id by itself: that took longer than all
        # else that is done to a sample.
        row = {f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name in ("logprob_tokens", "turns", "prefix_cached", "routed_experts"):
            if row[name] is None:
                del row[name]
        if not self.opening:
            del row["opening"]
        if self.turns is not None:
            row["turns"] = [dict(vars(turn)) for turn in self.turns]
            for turn in row["turns"]:
                if turn["routed_experts"] is None:
                    del turn["routed_experts"]
        if self.logprobs is not None:
            row["logprobs"] = [
                None if math.isnan(logprob) else logprob for logprob in self.logprobs
            ]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Sample":
        """Read what `to_json` wrote; keys of later versions are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in row.items() if key in known}
        if values.get("logprobs") is not None:
            values["logprobs"] = [
                math.nan if logprob is None else logprob for logprob in values["logprobs"]
            ]
        if values.get("turns") is not None:
            names = {f.name for f in dataclasses.fields(Turn)}
            values["turns"] = [
                Turn(**{key: value for key, value in turn.items() if key in names})
                for turn in values["turns"]
            ]
        return cls(**values)

    def sent(self, turn: int) -> list[Message]:
        """Return all messages that were sent for a turn, from 0 (or from the last, -1), without its
        reply.
        """
        assert self.turns is not None
        this = self.turns[turn]
        parts = [this.messages]
        while this.follows is not None and this.follows >= 0:
            this = self.turns[this.follows]
            parts += [[this.reply], this.messages]
        if this.follows is not None:
            parts.append(self.messages)
        return [message for part in reversed(parts) for message in part]

    @property
    def conversation(self) -> list[Message]:
        """Return what was said, in order: the messages and the answer; with turns, each one's new
        messages and its reply (where a turn starts over, all of its messages)."""
        if self.turns is None:
            return [*self.messages, {"role": "assistant", "content": self.text}]
        if self.turns and self.turns[0].follows is None:
            begun = []
        else:
            begun = list(self.messages)
        return begun + [message for turn in self.turns for message in (*turn.messages, turn.reply)]


@dataclass(kw_only=True)
class TaskResult:
    """The samples of one task, in order of their numbers, failed ones included."""

    task_id: str
    messages: list[Message]
    samples: list[Sample]
    prepared: "Prepared | None" = field(default=None, repr=False, compare=False)
    """What was made of just these samples in a process near the servers; None where nobody did. It
    holds while they stay as they are."""
    position: int = field(default=0, init=False, repr=False, compare=False)
    """Of its task in the call that sampled it."""

    @property
    def graded(self) -> list[Sample]:
        """Return the samples that have a reward."""
        return [sample for sample in self.samples if sample.reward is not None]

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]


@dataclass(kw_only=True)
class TokenizedResult:
    """One sample as one sequence: prompt, then completion. All lists have one entry per token and
    describe *that* token.

    A completion may hold several turns that the model wrote, with what it was told between them.
    Where its turns do not continue each other token by token, a sample is several sequences, with
    the same task, number, reward and advantage.

    (Packing moves labels, logprobs, advantages and masks to the position that predicts the token;
    nothing here is shifted.)
    """

    task_id: str
    sample: int
    token_ids: Sequence[int]
    tokens: list[str] | None = None
    """The tokens as text, for people; None where no tokenizer was at hand."""
    assistant_mask: Sequence[bool]
    """True for tokens that the model generated."""
    input_pos: Sequence[int]
    """0, 1, 2, …"""
    logprobs: Sequence[float]
    """The sampler's, NaN for the prompt and where unknown."""
    prompt_length: int
    reward: float
    advantage: float
    token_advantages: Sequence[float] | None = None
    """One per completion token, from `prompt_length` on, instead of `advantage`: of a value head,
    or of implicit rewards (`ttrl.data.token_advantages`); None: all `advantage`."""
    weights_version: int = -1
    token_versions: Sequence[int] | None = None
    """As in Sample: one per completion token, from `prompt_length` on; None: all `weights_version`.
    """
    finish_reason: str | None = None
    share: float = 1.0
    """Of the sample's generated tokens, the part that this sequence trains: below 1 where it is one
    of several.
    """
    experts: Any = None
    """The sampler's experts of every token: int16 array [tokens, layers, experts per token], -1
    where unknown; or None.
    """

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"task {self.task_id!r}, sample {self.sample}"


@dataclass(kw_only=True)
class Prepared:
    """What the process that samples a run's tasks would have to make of every group, where a
    rollout worker did.
    """

    lines: list[bytes]
    """Each sample's JSON, as it stands in rollouts.jsonl, without the end of the line."""
    sequences: list[TokenizedResult] | None = None
    """Of the graded samples, with arrays for lists and without their advantages; None where they
    are not tokenized.
    """
    counts: dict[str, int] = field(default_factory=dict)
    """Of the tokenization: the fields of `ttrl.data.tokenization.TokenizationCounts`."""


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI-compatible server is asked."""

    base_url: str
    """"http://127.0.0.1:8000/v1"."""
    api_key: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request."""
    uses_proxy: bool = False
    """Whether the environment's proxies hold for it: not for servers of our own."""

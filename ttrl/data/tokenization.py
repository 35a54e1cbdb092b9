"""Turn graded samples into token sequences: by the server's token ids, or by the chat template.

With ids nothing is tokenized again. Text, ids and log-probabilities are checked against each other:

    text against ids        they may differ for good reasons (a stop string cut off by the server,
                            bytes outside UTF-8): counted and logged, the ids are used
    ids against logprobs    one for each, else an error; if the server's token strings were kept,
                            the same tokens
    mask against ids        only tokens generated according to the server are trained

Without ids (`token_ids=False`), prompt and answer are made by the model's chat template
(`ttrl.data.chat.templates`), and each log-probability is given to the id covering exactly the same
bytes of the answer. The others are NaN, and counted.

A sample of several turns is one sequence if each prompt begins with the tokens before it, id by id.
Otherwise (a template leaving out earlier reasoning, text tokenized differently than generated), the
later turn begins another sequence, with its original prompt. Every generated token is trained once.
"""

import dataclasses
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrl.data.logprob_alignment import align, check_strings
from ttrl.data.turn_tokens import TokenSequence, TurnTokens, join, turns_by_ids, turns_by_template
from ttrl.errors import TokenizationError
from ttrl.messages import Tool
from ttrl.records import Sample, TaskResult, TokenizedResult

logger = logging.getLogger(__name__)


@dataclass
class TokenizationCounts:
    """Counts over all samples so far."""

    samples: int = 0
    sequences: int = 0
    """`samples`, and one more for every turn not continuing the tokens before it."""
    turns: int = 0
    mismatches: int = 0
    """Turns with a text different from their decoded ids."""
    unaligned: int = 0
    """Generated tokens without a log-probability (NaN), because none of the server's could be
    matched.
    """


class TaskResultTokenizer:
    """Makes one TokenizedResult, or several, of each graded sample of a group.

    tokenizer: a Hugging Face tokenizer; without one, `tokens` stay None, text is not compared, and
        samples need ids.

    For samples without ids: tools: those sent to the server with every request. stop_tokens and
    template_kwargs: see `ttrl.data.chat.templates.tokenize_chat`. end_of_turn: False if
    stop strings may have ended the answers: no end-of-turn token is then known to be sampled, and
    none is trained.

    >>> question = {"role": "user", "content": "What is 2 + 2?"}
    >>> sample = Sample(
    ...     task_id="sums/1", sample=0, messages=[question], text="4", reward=1.0,
    ...     prompt_token_ids=[5, 6], token_ids=[7], logprobs=[-0.5], finish_reason="stop",
    ... )
    >>> result = TaskResult(task_id="sums/1", messages=[question], samples=[sample])
    >>> [tokenized] = TaskResultTokenizer()(result, advantages=[0.5])
    >>> tokenized.token_ids, tokenized.prompt_length
    ([5, 6, 7], 2)
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        tools: list[Tool] | None = None,
        stop_tokens: Collection[str] | None = None,
        end_of_turn: bool = True,
        **template_kwargs: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._end_of_turn = end_of_turn
        self._template_kwargs = {"stop_tokens": stop_tokens, **template_kwargs}
        self._strings: dict[int, str] = {}
        self.counts = TokenizationCounts()

    @property
    def mismatches(self) -> int:
        return self.counts.mismatches

    def __call__(self, result: TaskResult, advantages: Sequence[float]) -> list[TokenizedResult]:
        """Return the graded samples of `result` as token sequences; `advantages` has one entry for
        each of them. Results tokenized by a rollout worker are used as they are. Raises
        TokenizationError if a sample has no ids and no template can make them, or lists of
        different lengths.
        """
        graded = result.graded
        if len(advantages) != len(graded):
            raise TokenizationError(
                f"task {result.task_id!r}: {len(advantages)} advantages for {len(graded)} graded "
                "samples; give one for each"
            )
        pairs = zip(graded, advantages, strict=True)
        if result.prepared is not None and result.prepared.sequences is not None:
            for name, count in result.prepared.counts.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)
            of = {sample.sample: advantage for sample, advantage in pairs}
            return [
                dataclasses.replace(known, advantage=of[known.sample])
                for known in result.prepared.sequences
            ]
        return [
            sequence
            for sample, advantage in pairs
            for sequence in self._tokenized(sample, advantage)
        ]

    def _tokenized(self, sample: Sample, advantage: float) -> list[TokenizedResult]:
        where = sample.where
        assert sample.reward is not None
        turns = self._turns(where, sample)
        sequences = join(turns)
        total = sum(len(turn.token_ids) for turn in turns)
        self.counts.samples += 1
        self.counts.turns += len(turns)
        self.counts.sequences += len(sequences)
        results = []
        for one in sequences:
            ids = one.token_ids
            trained = sum(one.assistant_mask)
            if len(set(one.versions)) > 1:
                versions = one.versions
            else:
                versions = None
            results.append(
                TokenizedResult(
                    task_id=sample.task_id,
                    sample=sample.sample,
                    token_ids=ids,
                    tokens=None
                    if self._tokenizer is None
                    else [self._string(token) for token in ids],
                    assistant_mask=one.assistant_mask,
                    input_pos=range(len(ids)),
                    logprobs=one.logprobs,
                    prompt_length=one.prompt_length,
                    reward=sample.reward,
                    advantage=advantage,
                    weights_version=max(one.versions, default=sample.weights_version),
                    token_versions=versions,
                    finish_reason=one.finish_reason,
                    share=1.0
                    if len(sequences) == 1
                    else trained / total
                    if total
                    else 1.0 / len(sequences),
                    experts=_filled(one),
                )
            )
        return results

    def _turns(self, where: str, sample: Sample) -> list[TurnTokens]:
        if sample.prompt_token_ids is not None and sample.token_ids is not None:
            turns = turns_by_ids(where, sample)
            if self._tokenizer is not None:
                for turn in turns:
                    self._compare(turn)
                    if turn.logprob_tokens is not None and sample.logprobs is not None:
                        turn.logprobs, unaligned = check_strings(
                            turn.where,
                            self._tokenizer,
                            turn.token_ids,
                            turn.logprobs,
                            turn.logprob_tokens,
                        )
                        self.counts.unaligned += unaligned
            return turns
        if (
            self._tokenizer is None
            or sample.token_ids is not None
            or sample.prompt_token_ids is not None
        ):
            raise TokenizationError(
                f"{where}: the server returned no token ids; sample with token_ids=True from a "
                "vLLM server, or give the model's tokenizer, and ttrl uses its chat template"
            )
        turns = turns_by_template(
            where, sample, self._tokenizer, self._tools, self._end_of_turn, self._template_kwargs
        )
        for turn in turns:
            if turn.logprob_tokens is None and not turn.logprobs:  # none were asked for
                turn.logprobs = [math.nan] * len(turn.token_ids)
                continue
            turn.logprobs, unaligned = align(
                self._tokenizer,
                turn.before,
                turn.token_ids,
                turn.logprobs,
                turn.logprob_tokens or [],
            )
            self.counts.unaligned += unaligned
        return turns

    def _string(self, token: int) -> str:
        if token not in self._strings:
            self._strings[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._strings[token]

    def _compare(self, turn: TurnTokens) -> None:
        decoded = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        # The server takes a stop string off the text, not off the ids; reasoning and tool calls it
        # takes out.
        same = decoded.strip() == turn.text.strip() or decoded.startswith(turn.text)
        if not same and not (turn.is_taken_apart and turn.text.strip() in decoded):
            self.counts.mismatches += 1
            if self.counts.mismatches == 1:
                logger.warning(
                    "%s: its ids decode to %.80r, but its text is %.80r; training uses the ids",
                    turn.where,
                    decoded,
                    turn.text,
                )


def _filled(one: TokenSequence) -> np.ndarray | None:
    """Return the experts of all tokens, -1 for missing ones at the end."""
    if one.experts is None:
        return None
    missing = len(one.token_ids) - len(one.experts)
    return np.pad(one.experts, ((0, missing), (0, 0), (0, 0)), constant_values=-1)


def as_arrays(sequence: TokenizedResult) -> TokenizedResult:
    """Return a sequence with arrays for lists, without the strings of its tokens: packing does not
    read them.
    """

    def array(values: Sequence[float] | None, dtype: type[np.generic]) -> Any:
        return None if values is None else np.array(values, dtype)

    return dataclasses.replace(
        sequence,
        tokens=None,
        token_ids=array(sequence.token_ids, np.int32),
        assistant_mask=array(sequence.assistant_mask, np.bool_),
        logprobs=array(sequence.logprobs, np.float32),
        token_versions=array(sequence.token_versions, np.int32),
    )

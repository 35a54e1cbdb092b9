"""From graded samples to token sequences, by the server's own token ids: nothing is tokenized again.

Text and ids are checked against each other where a tokenizer is at hand. They may differ for good reasons (a stop string that the
server cuts off, bytes that are no UTF-8), so a difference is counted and logged, and is no error.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

from ttrl.errors import TokenizationError
from ttrl.records import Sample, TaskResult, TokenizedResult

logger = logging.getLogger(__name__)


class TaskResultTokenizer:
    """Makes a TokenizedResult of each graded sample of a group. `tokenizer` is a Hugging Face tokenizer; without one, `tokens`
    stay None and text is not compared. `mismatches` counts the samples whose text was not what their ids decode to."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._strings: dict[int, str] = {}
        self.mismatches = 0

    def __call__(self, result: TaskResult, advantages: Sequence[float]) -> list[TokenizedResult]:
        """The graded samples of `result` as token sequences; `advantages` has one entry for each of them.

        Raises TokenizationError where a sample has no ids, or lists of different lengths.
        """
        graded = result.graded
        if len(advantages) != len(graded):
            raise TokenizationError(
                f"task {result.task_id!r}: {len(advantages)} advantages for {len(graded)} graded samples; give one for each"
            )
        return [self._tokenized(sample, advantage) for sample, advantage in zip(graded, advantages, strict=True)]

    def _tokenized(self, sample: Sample, advantage: float) -> TokenizedResult:
        where = f"task {sample.task_id!r}, sample {sample.sample}"
        prompt, completion = sample.prompt_token_ids, sample.token_ids
        if prompt is None or completion is None:
            raise TokenizationError(f"{where}: the server gave no token ids; sample with token_ids=True from a vLLM server")
        if not prompt:
            raise TokenizationError(f"{where}: the prompt has no tokens, so nothing predicts the first token of the completion")
        logprobs = sample.logprobs if sample.logprobs is not None else [math.nan] * len(completion)
        if len(logprobs) != len(completion):
            raise TokenizationError(
                f"{where}: the server returned {len(completion)} token ids but {len(logprobs)} logprobs; "
                "request return_token_ids and logprobs together"
            )
        versions = sample.token_versions
        if versions is not None and len(versions) != len(completion):
            raise TokenizationError(
                f"{where}: {len(completion)} token ids but {len(versions)} token_versions; a continued sample has one for each"
            )
        assert sample.reward is not None
        ids = [*prompt, *completion]
        tokens = None
        if self._tokenizer is not None:
            self._compare(where, sample, completion)
            tokens = [self._string(token) for token in ids]
        return TokenizedResult(
            task_id=sample.task_id,
            sample=sample.sample,
            token_ids=ids,
            tokens=tokens,
            assistant_mask=[False] * len(prompt) + [True] * len(completion),
            input_pos=list(range(len(ids))),
            logprobs=[math.nan] * len(prompt) + logprobs,
            prompt_length=len(prompt),
            reward=sample.reward,
            advantage=advantage,
            weights_version=sample.weights_version,
            token_versions=None if versions is None else list(versions),
            finish_reason=sample.finish_reason,
        )

    def _string(self, token: int) -> str:
        if token not in self._strings:
            self._strings[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._strings[token]

    def _compare(self, where: str, sample: Sample, completion: list[int]) -> None:
        decoded = self._tokenizer.decode(completion, skip_special_tokens=True)
        # The server takes a stop string off the text, not off the ids.
        if decoded.strip() != sample.text.strip() and not decoded.startswith(sample.text):
            self.mismatches += 1
            if self.mismatches == 1:
                logger.warning(
                    "%s: its ids decode to %.80r, but its text is %.80r; the ids are used", where, decoded, sample.text
                )

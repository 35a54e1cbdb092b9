"""Keep the entropy batch of a study: answers to prompts drawn uniformly with replacement from a
held-out set, one for each draw.

A server samples them from the policy at the start of an iteration. The trainer's own forward pass
recomputes their log-probabilities; the server's are only a check. Both stay in the study's folder,
so all checkpoints of a run are measured on the same answers:

    NNNN.safetensors   the answers of iteration NNNN's policy, packed, with its log-probabilities
    NNNN.json          the request for them, the digest of the file, the difference of the two
                       log-probabilities

At another checkpoint, importance weights take the place of sampling again (`EntropyBatch`). They
are relative to the recorded log-probabilities, so they are right for any policy, even that of a run
trained again. Their effective sample size decides how long they are good enough (LEAST_ESS).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.errors import PackError, RunFolderError
from ttrl.facts import Facts, parse
from ttrl.instruments.entropy_batch import EntropyBatch
from ttrl.records import Sample, TaskResult
from ttrl.system.files import digest, write_json
from ttrl.text import present
from ttrl.training.batches import check_pack
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import Policy

logger = logging.getLogger(__name__)

LEAST_ESS = 0.5
"""Weighted answers with a smaller share of effective ones are sampled again: their errors are those
of half as many answers, 1.4 times as large, so the same work measures more on fresh ones."""
_PACKED = ".safetensors"
_LONGEST_ROW = 1024
"""Positions of a row; longer answers get longer rows."""


class AnswersFacts(Facts, kw_only=True):
    """The content of NNNN.json."""

    request: str
    """Everything with an effect on the answers but the policy."""
    tasks: str
    iteration: int
    """Of the sampling policy: the one at this iteration's start."""
    digest: str
    """SHA-256 of the file."""
    answers: int
    failed: int = 0
    """Draws without an answer."""
    recorded: bool = False
    """Whether the log-probabilities are the trainer's; the server's before that."""
    mismatch: float | None = None
    """Mean |trainer's - server's log-probability| of a token."""


@dataclass(frozen=True)
class StoredAnswers:
    """Hold an entropy batch out of its file."""

    facts: AnswersFacts
    packed: PackedTensors

    def batch(self, policy: Policy, config: GRPOConfig, here: Ranks) -> EntropyBatch:
        """Return the answers as an entropy batch of the policy at hand."""
        once = dict.fromkeys(range(len(self.packed.samples)), 1)
        return EntropyBatch(policy, self.packed, once, config, here, self.facts.recorded)

    def fit(self, policy: Policy, config: GRPOConfig, here: Ranks) -> bool:
        """Tell whether enough answers are effective under the policy at an iteration's start; all
        of its own are, before the trainer's first pass. Raises PackError for another model's.
        """
        check_pack(self.packed, policy)
        if not self.facts.recorded:
            return True
        batch = self.batch(policy, config, here)
        share = batch.effective_size(batch.start_weights)
        if share < LEAST_ESS:
            logger.info(
                "the answers of iteration %d count as %.0f%% of as many before iteration %d, less "
                "than %.0f%%: sampling again",
                self.facts.iteration,
                100 * share,
                config.iteration,
                100 * LEAST_ESS,
            )
        return share >= LEAST_ESS


@dataclass(frozen=True)
class HeldOut:
    """Name a held-out set, and the way to its answers."""

    tasks: str
    """Its name, for people."""
    request: str
    """As in AnswersFacts."""
    folder: Path
    """For the files."""
    sample: Callable[[str, float], Sequence[Sample]]
    """Sample one answer for each draw, from a model folder at a temperature; a failed one has no
    reward."""
    also_in: Path | None = None
    """A second folder with the run's answers, only read."""

    def stored(self, iteration: int) -> StoredAnswers | None:
        """Return the stored answers of the nearest policy, the earlier one of two; None without
        any. Other requests' and damaged files are left out, and reported."""
        known = []
        folders = present([self.folder, self.also_in])
        described = [path for folder in folders for path in sorted(folder.glob("*.json"))]
        for path in described:
            try:
                facts = parse(AnswersFacts, path.read_bytes())
            except (ValueError, OSError) as error:
                logger.warning("%s: unreadable, so its answers are not used: %s", path, error)
                continue
            here = facts.iteration == iteration
            if facts.request == self.request and (here or facts.recorded):
                known.append((facts, path.with_suffix(_PACKED)))
        known.sort(key=lambda one: (abs(one[0].iteration - iteration), one[0].iteration))
        for facts, path in known:
            try:
                if digest(path) != facts.digest:
                    raise PackError(f"{path}: not the file that was written (its digest differs)")
                return StoredAnswers(facts, PackedTensors.load(path))
            except (PackError, OSError) as error:
                logger.warning("%s; its answers are not used", error)
        return None

    def draw(self, config: GRPOConfig) -> StoredAnswers:
        """Sample answers from the policy at an iteration's start, and store them. Raises
        RunFolderError if none has an answer, and the errors of the server."""
        logger.info(
            "sampling the entropy batch (%s) from the policy before iteration %d",
            self.tasks,
            config.iteration,
        )
        samples = self.sample(config.model, config.temperature)
        answered = [one for one in samples if one.reward is not None]
        if not answered:
            why = next((one.error for one in samples if one.error), "the server gave none")
            raise RunFolderError(f"no answer to {self.tasks} can be used: {why}")
        tokenizer = TaskResultTokenizer()
        sequences = [
            sequence
            for one in answered
            for sequence in tokenizer(
                TaskResult(task_id=one.task_id, messages=one.messages, samples=[one]), [0.0]
            )
        ]
        packed = packed_tensors_from_tokenized_results(
            sequences, seq_len=_LONGEST_ROW, pad_id=0, too_long="extend"
        )
        facts = AnswersFacts(
            request=self.request,
            tasks=self.tasks,
            iteration=config.iteration,
            digest="",
            answers=len(packed.samples),
            failed=len(samples) - len(packed.samples),
        )
        if facts.failed:
            logger.warning(
                "%d of %d draws have no answer; the entropy covers the others",
                facts.failed,
                len(samples),
            )
        return self._keep(StoredAnswers(facts, packed))

    def settle(self, answers: StoredAnswers, logprobs: Tensor) -> StoredAnswers:
        """Store the trainer's log-probabilities of the labels [B, T], NaN elsewhere."""
        apart = (logprobs - answers.packed.logprobs).abs()
        known = apart[torch.isfinite(apart)]
        mismatch = float(known.mean()) if len(known) else None
        packed = replace(answers.packed, logprobs=logprobs)
        facts = answers.facts.replace(recorded=True, mismatch=mismatch)
        return self._keep(StoredAnswers(facts, packed))

    def _keep(self, answers: StoredAnswers) -> StoredAnswers:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{answers.facts.iteration:04d}{_PACKED}"
        answers.packed.save(path)
        facts = answers.facts.replace(digest=digest(path))
        write_json(path.with_suffix(".json"), facts.to_json())
        return replace(answers, facts=facts)

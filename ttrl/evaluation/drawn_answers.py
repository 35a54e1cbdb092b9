"""Sample the answers of a study's entropy batch, by a server as in `ttrl eval`.

Prompts are drawn uniformly with replacement from held-out tasks, and each draw gets one answer,
with the sampling parameters of the run's training. Nothing is graded.
"""

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, RunFolderError
from ttrl.evaluation.evaluate import EvalConfig, checked_sets
from ttrl.records import Sample
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.task_results import sample_tasks
from ttrl.server.serving import serving
from ttrl.system.coroutines import run_async
from ttrl.system.files import json_text, read_jsonl
from ttrl.tasks.task import Task

RUNS_OWN = "the run's held-out tasks"
"""The name of the tasks in a run's validation.jsonl."""


@dataclass(frozen=True)
class DrawnAnswers:
    """Sample answers to drawn tasks (`tasks_of`)."""

    tasks: Sequence[Task]
    count: int
    """Draws."""
    seed: int
    """Decides which tasks are drawn."""
    config: TrainConfig
    """Of the run."""

    def __call__(self, model: str, temperature: float) -> list[Sample]:
        """Start a server for a model folder (or ask the one at an address), and return a sample for
        each draw, with its number as `sample`; a failed one has an error. Raises ServerError if all
        failed.
        """
        drawn = random.Random(self.seed).choices(self.tasks, k=self.count)
        numbered = [
            dataclasses.replace(task, id=f"{task.id}/draw {number}", grader=_ungraded)
            for number, task in enumerate(drawn)
        ]
        server = dict(self.config.server)
        with serving(
            model,
            dtype=None if self.config.dtype == "auto" else self.config.dtype,
            max_model_len=server.pop("max_model_len", None),
            server_args=server,
        ) as served:
            request = SamplingRequest(
                client=served.endpoint,
                model=served.model,
                params={**self._params(), "temperature": temperature},
                token_ids=served.is_ours,
                pbar_desc="entropy batch",
            )
            results = run_async(sample_tasks(numbered, request))
        results.raise_if_all_failed()
        return [
            dataclasses.replace(result.samples[0], task_id=task.id, sample=number)
            for number, (task, result) in enumerate(zip(drawn, results, strict=True))
        ]

    def request(self, name: str) -> str:
        """Describe everything with an effect on the answers but the policy, as JSON."""
        prompts = json_text([[task.id, task.messages] for task in self.tasks])
        return json_text(
            {
                "tasks": name,
                "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
                "params": self._params(),
                "answers": self.count,
                "seed": self.seed,
            }
        )

    def _params(self) -> Mapping[str, Any]:
        # A seed would give all draws of a prompt the same answer.
        kept = {name: one for name, one in self.config.sampling.items() if name != "seed"}
        return kept | {"max_tokens": self.config.max_tokens}


def tasks_of(run: Path, spec: str | None, config: TrainConfig) -> list[Task]:
    """Return the held-out tasks of `spec`, as `ttrl eval --tasks` takes it. None: the tasks of the
    run's newest validation, or an empty list if there are none of single answers. Raises
    ConfigError for a wrong `spec`, or one of tasks with several answers.
    """
    if spec is None:
        return _own(run)
    sets = checked_sets(EvalConfig(model=config.model, tasks=spec, pbar=False))
    tasks = [task for one in sets for task in one.tasks]
    several = [task.id for task in tasks if task.rollout is not None]
    if several:
        raise ConfigError(
            "arguments",
            [
                f"--entropy-tasks is {spec}, and {len(several)} of its {len(tasks)} tasks have "
                f"several answers (such as {several[0]!r}); the entropy is that of single answers"
            ],
        )
    return tasks


def _own(run: Path) -> list[Task]:
    for path in sorted(run.glob("iterations/*/validation.jsonl"), reverse=True):
        try:
            samples = [Sample.from_json(row) for row in read_jsonl(path)]
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"{path}: its samples cannot be read: {error}") from error
        if any(one.turns is not None for one in samples):
            return []
        by_id = {one.task_id: one.messages for one in samples}
        if by_id:
            return [Task(list(messages), _ungraded, id=name) for name, messages in by_id.items()]
    return []


def _ungraded(choice: object) -> float:
    """Give every answer the same reward: a study looks at none."""
    return 0.0

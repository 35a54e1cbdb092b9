"""Samples tasks from the run's server: what is there already is not sampled again, and what comes is kept as it comes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ttrl.configs.run import TrainConfig
from ttrl.launch.policy_server import MAX_DOWNTIME, PolicyServer
from ttrl.loop.carried import is_open, kept_groups, place_of, task_key, usage_of
from ttrl.loop.finished_groups import FinishedGroups
from ttrl.loop.timeline import Timeline
from ttrl.records import TaskResult
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.system.console import Console, clock
from ttrl.system.coroutines import run_async
from ttrl.tasks.task import Task


class Sampler:
    """The way from tasks to graded groups. May be used by several threads at once."""

    def __init__(self, config: TrainConfig, server: PolicyServer, console: Console, timeline: Timeline) -> None:
        self._config, self._server, self._console, self._timeline = config, server, console, timeline

    def sample(
        self,
        tasks: Sequence[Task],
        n: int,
        temperature: float,
        version: int,
        what: str,
        partial: Path | None = None,
        budget: int | None = None,
        carried: Sequence[TaskResult] = (),
        known: TaskResults | None = None,
        prepare: Callable[[TaskResult], None] | None = None,
    ) -> TaskResults:
        """Samples from the running server. With `partial`, finished groups are kept there, and those that lie there are not
        sampled again. With `budget`, so many new tokens are sampled (and as many again while no group is finished); `carried` are
        the groups to continue, those of the first tasks. `known`: what a call for the first of these tasks returned. `prepare` is
        called with every group as soon as it is finished, in another thread. Raises ServerDiedError where the server is gone,
        ServerError, GraderError or RolloutError where every sample failed."""
        done = dict(enumerate(known or ()))
        kept = {} if partial is None else kept_groups(partial, tasks, n, version, carried)
        kept = {position: group for position, group in kept.items() if position not in done}
        done |= kept
        waiting = dict(enumerate(carried))
        missing = [position for position in range(len(tasks)) if position not in done]
        positions: dict[str, list[int]] = {}
        for position in missing:
            positions.setdefault(task_key(tasks[position].id, tasks[position].messages), []).append(position)
        config = self._config

        async def sample(finished: FinishedGroups, token_budget: int | None) -> TaskResults:
            def take(group: TaskResult) -> None:
                if not is_open(group):
                    # A group without any grade is sampled again, so that a grader that failed can be put right.
                    finished.add(group, place_of(group, positions, carried) if group.graded else None)

            async with self._server.running.client() as client:
                return await get_task_results(
                    [tasks[position] for position in missing],
                    client,
                    self._server.running.model_name,
                    n=n,
                    params={**config.sampling, "temperature": temperature, "max_tokens": config.max_tokens},
                    weights_version=version,
                    on_task_done=take,
                    pbar=not self._console.quiet,
                    pbar_desc=what,
                    cache=config.cache or None,
                    weights_digest=self._server.running.weights_digest() if config.cache else None,
                    token_budget=token_budget,
                    unfinished=[waiting[position] for position in missing if position in waiting],
                    max_downtime=MAX_DOWNTIME,
                )

        began = clock()
        spent = sum(usage.new_completion for usage in usage_of(done, carried))
        left = None if budget is None else max(1, budget - spent)
        while missing:
            with FinishedGroups(partial, prepare) as finished, self._timeline.span("sample"):
                fresh = run_async(sample(finished, left))
            if any(s.finish_reason is None for s in fresh.samples):
                self._server.running.check()  # says why, where the server is gone
            done.update(zip(missing, fresh, strict=True))
            if not all(map(is_open, done.values())):
                break
            waiting, missing, left = dict(done), sorted(done), budget
        # Tokens that an earlier process sampled took their time there: no speed can be told from ours.
        seconds = clock() - began if not kept else None
        if known is not None:
            before = known.stats.seconds
            seconds = None if seconds is None or before is None else before + seconds
        groups = [done[position] for position in range(len(tasks))]
        results = TaskResults(groups, seconds=seconds, usage=usage_of(dict(enumerate(groups)), carried))
        results.raise_if_all_failed()
        return results

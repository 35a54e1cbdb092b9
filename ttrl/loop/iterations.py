"""Run the phases of a run in order, some of them concurrently.

Each policy, from the starting model on, has its own work: its validation and its rollouts. Both go
to the server together, as it serves one policy at a time; the server then gets the next one.

    policy i      = the checkpoint after iteration i
    its work      validate(i)   rollouts(i + 1)                          off_policy_steps 0
                  validate(i)   rollouts(i + 2); of policy 0 those of iterations 1 and 2      1
    policy i + 1  needs rollouts(i + 1), then pack(i + 1) and train(i + 1)

With off_policy_steps 0 the trainer waits for the rollouts of the policy it will change; with 1 it
works while policy i samples for the iteration after it. Iteration numbers decide each policy's
samples, never timing. So a run continued after any end does the same as an uninterrupted one
(a phase is done once its marker exists).

The main thread prepares, packs, trains, and brings weights to the server. Requests to the server
run in jobs, as does the work after a validation: the line of metrics, the report, the pruning of
checkpoints.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

from ttrl.errors import DriftError
from ttrl.facts import Flops, MetricsRow
from ttrl.loop.environment import describe_environment
from ttrl.loop.jobs import Jobs, PhaseJob
from ttrl.loop.machine_use import MachineWatch
from ttrl.loop.phases import Phases
from ttrl.monitoring.drift import check_drift
from ttrl.monitoring.findings import findings
from ttrl.monitoring.loggers import Loggers
from ttrl.monitoring.progress_line import INDENT, iteration_lines
from ttrl.plans.planner import measure_machine
from ttrl.report.page import leave_report
from ttrl.run_folder.metrics import has_reached, metrics_row
from ttrl.run_folder.pruning import prune
from ttrl.system.console import clock
from ttrl.system.files import append_jsonl, write_json
from ttrl.system.tracing import Attributes, Span, span


class Iterations:
    """Run the remaining iterations of a run."""

    def __init__(
        self, phases: Phases, loggers: Loggers, report: Callable[..., Path] = leave_report
    ) -> None:
        """report: writes the report of a run folder with these rows."""
        self._report = report
        self._loggers = loggers
        self._phases = phases
        self._config = phases.config
        self._folder = phases.folder
        self._console = phases.console
        self._rows: dict[int, MetricsRow] = {row.iteration: row for row in self._folder.metrics()}
        # Waiting also notices the death of an idle trainer.
        self._jobs = Jobs(phases.check_trainer)
        self._sampled: set[int] = set()
        """Iterations with finished rollouts."""
        self._machine = MachineWatch()
        self._reached: int | None = None
        """The first iteration to reach `stop_at` in validation."""
        self._spans: dict[int, Span] = {}
        """Of the iterations under way."""

    def run(self) -> None:
        """Run the remaining iterations in order. Raises a phase's errors, with nothing left
        running.
        """
        numbers = range(self._config.iterations + 1)
        last = next(
            (n for n in numbers if n not in self._rows or has_reached(self._rows[n], self._config)),
            None,
        )
        if last is None or last in self._rows:
            self._phases.write(self._config.iterations if last is None else last)
            self._say_reached(last)
            self._console.line(
                f"{self._folder.path} is finished; raise iterations, or change stop_at, to "
                "continue it"
            )
            return
        if self._rows:
            self._console.line(
                f"continuing {self._folder.path} after iteration {max(self._rows)}: starting "
                "vLLM and the trainer "
                f"(half a minute or more; logs: {self._folder.path / 'logs'})"
            )
        self._resumed = {
            n for n in numbers if n not in self._rows and self._phases.anything_done(n)
        }
        self._finished_at = clock()
        if last == 0:
            measure_machine(self._config, self._folder.path, self._phases.model)
        self._machine.begin()
        try:
            self._jobs.begin(
                "environment",
                lambda: write_json(self._folder.path / "environment.json", describe_environment()),
            )
            self._jobs.begin("tokenizer", lambda: self._phases.tokenizer())
            self._start_trainer_and_server(last)
            for number in numbers:
                self._make_policy(number)
                self._jobs.wait_for_all()  # they need the policy before it
                if self._reached is not None:
                    break
                self._begin_validation_and_rollouts(number)
            self._jobs.wait_for_all()
            self._phases.write(self._config.iterations if self._reached is None else self._reached)
            self._say_reached(self._reached)
        finally:
            self._machine.end()
            self._jobs.close()
            failure = sys.exc_info()[0]
            for number in list(self._spans):
                self._spans.pop(number).end(failure)

    def _phase(self, name: str, number: int) -> Span:
        """Begin the span of a phase, within its iteration's."""
        about: Attributes = {"rl.run": self._folder.path.name, "rl.iteration": number}
        if number not in self._spans:
            self._spans.setdefault(number, span(f"iteration {number}", about))
        return span(name, {**about, "rl.phase": name}, parent=self._spans[number])

    def _start_trainer_and_server(self, number: int) -> None:
        """Start trainer and server in the background. `number`: the first unfinished iteration."""
        folder = self._folder
        config = self._config
        numbers = range(max(1, number), config.iterations + 1)
        to_train = next((n for n in numbers if not folder.iteration(n).is_done("train")), None)
        # On a shared GPU the trainer loads for its first request, while no server starts.
        if to_train is not None and not config.shares_gpu:
            self._phases.start_trainer(to_train)
        if number == 0 and not folder.iteration(0).is_done("prepare"):
            return  # `prepare` starts the server early
        if not folder.iteration(number).is_done("rollouts") and number > 0:
            self._phases.server.start(
                folder.checkpoint(folder.written_version(config.policy_of_rollouts(number)))
            )
        elif (
            number == 0 or folder.iteration(number).is_done("train")
        ) and self._phases.has_to_validate(number):
            self._phases.server.start(folder.checkpoint(folder.written_version(number)))

    def _make_policy(self, number: int) -> None:
        """Make the checkpoint after iteration `number`, unless `stop_at` was reached before."""
        if number in self._rows:
            return
        if number == 0:
            with self._phase("prepare", number):
                self._phases.prepare()
            return
        self._jobs.wait(lambda: self._reached is not None or number in self._sampled)
        if self._reached is not None:
            return self._jobs.close()
        with self._phase("pack", number):
            self._phases.pack(number)
        # The trainer may begin during the validation of the previous policy, unless the run may end
        # there or the server is in the way.
        if self._config.stop_at is not None or self._config.server_stops:
            self._jobs.wait(lambda: number - 1 in self._rows)
            if self._reached is not None:
                return self._jobs.close()
        with self._phase("train", number):
            self._phases.train_policy(number)
        compared = None
        if number in self._folder.held:
            compared = self._phases.trainer.compared
        try:  # before the policy samples
            check_drift(
                self._config,
                self._folder,
                number,
                self._console,
                self._phases.ask_server(),
                compared,
            )
        except DriftError:
            self._phases.finish_saving()
            raise

    def _begin_validation_and_rollouts(self, number: int) -> None:
        """Begin the work of the policy after iteration `number`, without waiting."""
        rollouts = []
        for later in self._config.rollouts_of_policy(number):
            if later in self._rows or self._folder.iteration(later).is_done("rollouts"):
                self._sampled.add(later)
            elif later <= self._config.iterations:
                rollouts.append(later)
        finish = number not in self._rows
        validate = finish and self._phases.has_to_validate(number)
        if validate or rollouts:
            with self._phase("sync", number):
                self._phases.sync(number, "validate" if validate else "rollouts")
        validation = None
        if finish:  # first, to put its requests first: it may end the run
            validation = self._jobs.begin(
                f"validation {number}", functools.partial(self._validate, number)
            )
        if rollouts:
            self._jobs.begin(f"rollouts {rollouts[0]}", lambda: self._sample(rollouts))
        self._phases.finish_saving(self._jobs.wait_for_all)  # concurrently with all of it
        if validation is not None:
            self._jobs.begin(
                f"metrics {number}", functools.partial(self._finish, number, validation)
            )

    def _validate(self, number: int) -> None:
        if self._phases.has_to_validate(number):
            with self._phase("validate", number):
                self._phases.validate(number)

    def _sample(self, numbers: list[int]) -> None:
        for number in numbers:
            with self._phase("rollouts", number):
                self._phases.rollouts(number)
            self._sampled.add(number)
            self._jobs.tell()

    def _finish(self, number: int, validation: PhaseJob) -> None:
        """Write the metrics and report of iteration `number`, once its policy is validated."""
        validation.thread.join()
        if validation.error is not None or self._phases.has_to_validate(number):
            return  # the thread waiting for all will say why
        row = metrics_row(self._folder.iteration(number))
        now = clock()
        if number not in self._resumed:  # all of it was done by this process
            timeline = self._phases.timeline
            total = now - self._finished_at
            row = row.replace(
                seconds=row.seconds.replace(total=total),
                dead_seconds=total - timeline.busy(self._finished_at, now),
                machine=self._machine.take(timeline, now),
            )
        if row.flops.total is not None:
            before = self._rows[number - 1].flops if number - 1 in self._rows else Flops()
            cumulated = (before.cumulated or 0.0) + row.flops.total
            row = row.replace(flops=row.flops.replace(cumulated=cumulated))
        self._finished_at = now
        self._phases.timeline.forget_before(now)
        append_jsonl(self._folder.path / "metrics.jsonl", row.to_json())
        said = findings(list(self._rows.values()), self._config.to_dict())
        self._rows[number] = row
        rows = list(self._rows.values())
        for line in iteration_lines(
            rows, self._config, findings(rows, self._config.to_dict()), said
        ):
            self._console.line(line, indent=INDENT)
        self._loggers.log(rows)
        self._spans.pop(number, Span()).end()
        if has_reached(row, self._config):
            self._reached = number
        self._jobs.tell()
        self._report(self._folder.path, rows)
        prune(self._folder, rows, self._config, number)

    def _say_reached(self, number: int | None) -> None:
        if number is not None:
            config = self._config
            self._console.line(
                f"{config.validation_metric} reached {config.stop_at} in validation; done after "
                f"iteration {number}"
            )

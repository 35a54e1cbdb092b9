"""Evaluate a model on the tasks of one or more families. `ttrl eval` is the command.

from ttrl import evaluate

result = evaluate(
    "runs/NAME/iterations/0030/checkpoint",
    "letter_counting,gsm8k=data/gsm8k",
    n=200,
    output="after.json",
)
print(result.table())
print(result["gsm8k"].accuracy)
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrl.configs.base import Config, settings
from ttrl.configs.vllm_arguments import argument_problems
from ttrl.errors import ConfigError, ModelFolderError, ServerError, TtrlError, UserError, complaints
from ttrl.evaluation.eval_results import EvalResult, SetResult, read_result
from ttrl.evaluation.families import GENERATED_BY_DEFAULT, TaskSpec
from ttrl.messages import JsonObject
from ttrl.ready_models import is_ready, model_named
from ttrl.registries import FAMILIES
from ttrl.rollouts.cache.completions import Cache
from ttrl.rollouts.client.chat_completions import checked_parameters
from ttrl.rollouts.client.transport import is_local
from ttrl.rollouts.progress import Prices
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.results import TaskResults
from ttrl.rollouts.task_results import sample_tasks
from ttrl.server.chat_template import read_chat_template, templated
from ttrl.server.model_folder import check_model, weights_digest
from ttrl.server.serving import KEY_VARIABLE, address_problem, default_dtype, is_address, serving
from ttrl.server.vllm import own_argument_problems
from ttrl.system.console import mistakes_in_lines
from ttrl.system.coroutines import run_async
from ttrl.system.files import atomic_file
from ttrl.tasks.reference import load_tasks
from ttrl.tasks.task import Task

logger = logging.getLogger(__name__)

_RIGHT = ("right", "exact", "correct", "solved", "accuracy")
"""Metrics of right answers, in order of preference."""
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")
_SAME_ANSWERS = frozenset(
    {
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "gpu-memory-utilization",
    }
)
"""Arguments of vLLM for placement, without effect on answers."""


@settings
class EvalConfig(Config):
    """The settings of an evaluation."""

    model: str
    """A model folder or a name on the hub (ttrl starts and stops a vLLM server for it), or the
    address of a server.
    """
    tasks: "str | Sequence[str] | Mapping[str, Sequence[Task]]"
    """Families as text, "gsm8k=data/gsm8k,mmlu" (see `ttrl.evaluation.families`), with your own
    files, "my_task.py"; or tasks by name.
    """
    n: int | None = None
    """The most tasks of each family; None: all, or 200 of generated ones and of your own files."""
    seed: int = 0
    """The seed for drawing tasks of a train split; validation and test do not depend on it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of families: {"gsm8k.style": "r1"}."""
    samples_per_task: int = 1
    """Replies to each task."""
    temperature: float | None = None
    """Sampling temperature; None: 0 for one sample a task, 1 for several."""
    top_p: float | None = None
    """Sample from the likeliest tokens up to this total probability; None: from all."""
    max_tokens: int | None = None
    """Tokens of one reply; None: as many as fit the model's context."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Any other sampling parameters of the OpenAI API or of vLLM."""
    system_prompt: str | None = None
    """A first message for every task."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the model's chat template, such as {"enable_thinking": False}."""
    name: str | None = None
    """The model's name at an address; None: the first in its list."""
    key_variable: str = KEY_VARIABLE
    """The environment variable with an address's key. There is no other way to pass a key, and none
    is ever written down.
    """
    dtype: str | None = None
    """Dtype of a started server: "fp32", "bf16", "auto" or vLLM's own names; None: fp32 on CPU,
    else vLLM's choice.
    """
    max_model_len: int | None = None
    """Tokens of prompt and reply at a started server; None: the model's context."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM for a started server, such as {"tensor_parallel_size": 2}."""
    chat_template: str | None = None
    """Another chat template than the model's, as text or as a file, for a started server."""
    server_log: str | os.PathLike[str] | None = None
    """The log file of a started server; None: a temporary one."""
    cache: str | os.PathLike[str] | None = None
    """A store of completions: a folder, "s3://…". The same evaluation, or one of more tasks,
    continues from them.
    """
    weights_digest: str | None = None
    """A name for the weights at an address on this machine, for the cache; a model folder is
    identified by its contents.
    """
    concurrency: int | None = None
    """Requests at a time; None: as many as fit the server's KV cache."""
    isolated: bool = False
    """Run graders in separate processes, with time limits."""
    grader_timeout: float = 60.0
    """Seconds for one grade."""
    prices: tuple[float, float] | None = None
    """Dollars per million prompt and completion tokens."""
    pass_at: Sequence[int] = ()
    """k of pass@k, at most samples_per_task. None given, with several samples: 1, 2, 4, … and
    samples_per_task.
    """
    confidence: float = 0.95
    """Confidence of the intervals."""
    output: str | os.PathLike[str] | None = None
    """The JSON, rewritten after each family."""
    samples_file: str | os.PathLike[str] | None = None
    """Every sample as a line of JSON, as in a run's rollouts.jsonl."""
    pbar: bool = True
    """Show progress."""

    def problems(self) -> list[str]:
        """Return all problems, except those of the tasks and the model folder."""
        found = []
        if not self.model:
            found.append("model is ''; give a model folder, a name on the hub, or an address")
        found += self.at_least(1, "n", "max_tokens", "concurrency", "samples_per_task")
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_task]
        if wrong:
            found.append(
                f"pass_at has {wrong}; pass@k needs samples_per_task >= k >= 1, but "
                f"samples_per_task is {self.samples_per_task}"
            )
        if self.temperature is not None and not 0 <= self.temperature <= 10:
            found.append(f"temperature is {self.temperature}; give a number from 0 to 10")
        if self.samples_per_task != 1 and 0 in (self.temperature, self.params.get("temperature")):
            found.append(
                f"temperature is 0 with {self.samples_per_task} samples per task: all would be "
                "equal; raise it, or sample once"
            )
        if not 0.5 <= self.confidence <= 0.9999:
            found.append(
                f"confidence is {self.confidence}; give a number from 0.5 to 0.9999, such as 0.95"
            )
        if self.prices is not None:
            found += complaints(lambda: Prices.of(self.prices))
        found += complaints(lambda: checked_parameters(self.sampling_params()))
        refused = [*own_argument_problems(self.server_args), *argument_problems(self.server_args)]
        found += [f"server_args: {problem}" for problem in refused]
        if self.chat_template is not None:
            found += complaints(lambda: read_chat_template(self.chat_template or ""))
        if self.cache is not None:
            found += complaints(self._check_cache)
        if is_address(self.model):
            found += filter(None, [address_problem(self.model)])
            given = {
                name: getattr(self, name) for name in ("dtype", "max_model_len", "chat_template")
            }
            given["server_args"] = self.server_args or None
            found += [
                f"{name} is for a local server; the one at an address already runs: leave it out"
                for name, value in given.items()
                if value is not None
            ]
        elif self.name is not None:
            found.append(
                f"name is {self.name!r}, but names are for addresses; leave it out: a local server "
                "needs none"
            )
        return found

    def _check_cache(self) -> None:
        Cache.of(self.cache)
        if is_address(self.model) and is_local(self.model) and self.weights_digest is None:
            raise UserError(
                "cache: the server on this machine may later serve other weights, and the cache "
                "would return outdated replies. Set weights_digest (--weights-digest) to a name "
                "for these weights"
            )

    def sampling_params(self) -> Mapping[str, Any]:
        """Return the parameters of each request."""
        params: dict[str, object] = {"logprobs": False}
        temperature = self.temperature
        if temperature is None and "temperature" not in self.params:
            if self.samples_per_task == 1:
                temperature = 0.0
            else:
                temperature = 1.0
        given = {"temperature": temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        params |= {name: value for name, value in given.items() if value is not None}
        if self.chat_template_kwargs:
            params["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return {**params, **self.params}

    @classmethod
    def elsewhere(cls, name: str) -> str | None:
        return _FORMER.get(name)

    def told(self) -> dict[str, Any]:
        """Return the settings with effect on answers, for the JSON; no keys."""
        told = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name not in _NOT_TOLD
        }
        cache = Cache.of(self.cache)
        if cache is not None:
            told["cache"] = cache.describe()
        told["params"] = self.sampling_params()
        told["tasks"] = self.tasks if isinstance(self.tasks, str) else list(self.tasks)
        return dict(json.loads(json.dumps(told, default=str)))


_NOT_TOLD = frozenset(
    {
        "model",
        "output",
        "samples_file",
        "pbar",
        "server_log",
        "confidence",
        "key_variable",
        "temperature",
        "top_p",
        "max_tokens",
        "chat_template_kwargs",
    }
)
_FORMER = {"samples": "samples_per_task", "system": "system_prompt", "api_key_env": "key_variable"}
"""Former names of the command's options, still accepted."""


@mistakes_in_lines()
def evaluate(
    model: str, tasks: "str | Sequence[str] | Mapping[str, Sequence[Task]]", **settings: Any
) -> EvalResult:
    """Evaluate a model on tasks; `settings` are the fields of EvalConfig.

    A family without any grade is named in `EvalResult.failed`; the others are evaluated all the
    same, unless the server failed. Raises ConfigError, with all problems, before a server starts.
    If no family has a grade, raises ServerError, GraderError or RolloutError with the commonest
    reason.

    >>> def right(choice):
    ...     return float("5" in choice.message.content)
    >>> tasks = [Task([{"role": "user", "content": "What is 2 + 3?"}], right)]
    >>> found = evaluate("http://127.0.0.1:8000/v1", {"sums": tasks}, pbar=False)
    >>> found["sums"].accuracy.mean
    1.0
    """
    return run_evaluation(EvalConfig(model=model, tasks=tasks, **settings))


def run_evaluation(config: EvalConfig) -> EvalResult:
    """Evaluate by a config; see `evaluate`."""
    sets = checked_sets(config)
    config = dataclasses.replace(config, model=model_named(config.model))
    if config.chat_template is not None:  # the results keep the text
        template = read_chat_template(config.chat_template)
        config = dataclasses.replace(config, chat_template=template)
    result = EvalResult(model=config.model, settings=config.told(), confidence=config.confidence)
    started = time.monotonic()
    if config.pbar and not is_address(config.model):
        logger.info("starting a vLLM server for %s (half a minute or more)", config.model)
    with contextlib.ExitStack() as stack:
        samples = stack.enter_context(_samples(config.samples_file))
        folder = stack.enter_context(templated(config.model, config.chat_template))
        served = stack.enter_context(
            serving(
                folder,
                name=config.name,
                key_variable=config.key_variable,
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                server_args=config.server_args,
                log_path=config.server_log,
            )
        )
        if config.pbar and served.parsers:
            logger.info("%s", served.parsers)
        result.settings["name"] = served.model
        digest = None
        if config.cache is not None:
            digest = _digest(dataclasses.replace(config, model=folder))
        request = SamplingRequest(
            client=served.endpoint,
            model=served.model,
            n=config.samples_per_task,
            params=config.sampling_params(),
            token_ids=served.is_ours,
            cache=config.cache,
            weights_digest=digest,
            concurrency=config.concurrency,
            isolated=config.isolated,
            grader_timeout=config.grader_timeout,
            prices=config.prices,
            pbar=config.pbar,
        )
        for one in sets:
            named = dataclasses.replace(request, pbar_desc=one.name)
            results = run_async(sample_tasks(one.tasks, named))
            if config.pbar:
                logger.info("%s: %s", one.name, results.stats.summary())
            for task_result in results:
                for sample in task_result.samples:
                    samples.append({"set": one.name, **sample.to_json()})
            result.sets.append(
                SetResult.of(
                    one.name,
                    one.tasks,
                    results,
                    score=_score(one, results),
                    samples_per_task=config.samples_per_task,
                    pass_at=_pass_at(config),
                    confidence=config.confidence,
                )
            )
            result.seconds = time.monotonic() - started
            result.complete = len(result.sets) == len(sets)
            failure = _failure(results)
            if failure is not None:
                result.failed[one.name] = str(failure)
            if config.output is not None:
                result.write(config.output)
            if failure is not None and (isinstance(failure, ServerError) or result.complete):
                if len(result.failed) == len(result.sets):
                    raise failure
                break
    return result


def _score(one: "NamedTasks", results: TaskResults) -> str:
    """Return the score for right answers: the tasks' own, else a metric of their graders, by
    name.
    """
    if one.score != "reward":
        return one.score
    graded = [sample.scores for sample in results.samples if sample.reward is not None]
    return next(
        (name for name in _RIGHT if graded and all(name in scores for scores in graded)), "reward"
    )


def _failure(results: TaskResults) -> TtrlError | None:
    """Return the error if no sample has a grade, else None."""
    try:
        results.raise_if_all_failed()
    except TtrlError as error:
        return error
    return None


@dataclass(frozen=True)
class NamedTasks:
    """One set of tasks to evaluate."""

    name: str
    score: str
    tasks: list[Task]


def checked_sets(config: EvalConfig) -> list[NamedTasks]:
    """Check everything and return the tasks. Raises ConfigError with all problems: settings,
    families, data, model folder.
    """
    config, problems = config.examined()
    if config.model and not is_address(config.model):
        try:
            if not is_ready(config.model):
                check_model(config.model, chat_template=config.chat_template is None)
        except ModelFolderError as error:
            hint = f"; a server's address begins with http://: http://{config.model}"
            problems.append(f"{error}{hint if _HOST_AND_PORT.match(config.model) else ''}")
    problems += _file_problems(config)
    sets: list[NamedTasks] = []
    n = config.n
    if n is not None and n < 1:
        n = 1  # still check the other settings of the tasks
    if isinstance(config.tasks, Mapping):
        sets = [NamedTasks(name, "reward", list(tasks)[:n]) for name, tasks in config.tasks.items()]
        problems += [
            f"option {name!r} belongs to a family, but you gave tasks; leave it out"
            for name in config.options
        ]
    else:
        if isinstance(config.tasks, str):
            asked = config.tasks.split(",")
        else:
            asked = list(config.tasks)
        if config.pbar:  # puzzles take a while to make, data to load
            logger.info("preparing the tasks: %s", ", ".join(asked))
        sets, found = _named(list(filter(None, (one.strip() for one in asked))), config, n)
        problems += found
    if not problems and not any(one.tasks for one in sets):
        problems.append(f"no tasks; name some of {', '.join(sorted(FAMILIES.names()))}")
    for place, one in enumerate(sets):
        if one.name in [other.name for other in sets[:place]]:
            problems.append(f"{one.name} is listed twice; leave one out")
        if config.system_prompt is not None:
            try:
                sets[place] = _with_system(one, config.system_prompt)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("evaluation", problems)
    return sets


def _named(
    asked: Sequence[str], config: EvalConfig, n: int | None
) -> tuple[list[NamedTasks], list[str]]:
    """Return (sets, problems) of families and files."""
    sets = []
    problems = []
    options = config.options
    used: set[str] = set()
    for text in asked:
        try:
            is_family = text.partition(":")[0] in FAMILIES
            if not is_family and (text.partition("=")[0].endswith(".py") or ".py:" in text):
                sets.append(
                    NamedTasks(
                        text,
                        "reward",
                        load_tasks(text, n if n is not None else GENERATED_BY_DEFAULT),
                    )
                )
                continue
            spec = TaskSpec.parse(text)
            for key in [
                key for key in options if key.partition(".")[0].replace("-", "_") == spec.family
            ]:
                used.add(key)
                spec = spec.with_option(key.partition(".")[2], options[key])
            sets.append(
                NamedTasks(str(spec), FAMILIES[spec.family].score, spec.tasks(n, config.seed))
            )
        except UserError as error:
            message = str(error)
            problems.append(message if message.startswith(text) else f"{text}: {message}")
    names = ", ".join(asked)
    problems += [
        f"option {key!r} belongs to none of the families ({names}); write FAMILY.NAME"
        for key in options.keys() - used
    ]
    return sets, problems


def _with_system(one: NamedTasks, prompt: str) -> NamedTasks:
    """Return the tasks with a first message; their ids stay. Raises UserError for a task with its
    own.
    """
    for task in one.tasks:
        if task.messages[0]["role"] in ("system", "developer"):
            raise UserError(
                f"task {task.id!r} has a system message of its own; leave system_prompt out"
            )
    first = {"role": "system", "content": prompt}
    tasks = [dataclasses.replace(task, messages=[first, *task.messages]) for task in one.tasks]
    return dataclasses.replace(one, tasks=tasks)


def _pass_at(config: EvalConfig) -> list[int]:
    if config.pass_at or config.samples_per_task == 1:
        return list(config.pass_at)
    powers = [2**power for power in range(config.samples_per_task.bit_length())]
    return [*(k for k in powers if k < config.samples_per_task), config.samples_per_task]


def _digest(config: EvalConfig) -> str | None:
    """Return an identity of the weights for the cache. None for servers elsewhere: the cache knows
    them by their address.
    """
    if config.weights_digest is not None or is_address(config.model):
        return config.weights_digest
    digest = f"{weights_digest(config.model)}/{config.dtype or default_dtype()}"
    # The context's length truncates replies; some of vLLM's arguments change the computation, such
    # as quantization.
    server = {
        "max_model_len": config.max_model_len,
        **{name.replace("_", "-"): v for name, v in config.server_args.items()},
    }
    given = {
        name: value
        for name, value in server.items()
        if value is not None and name not in _SAME_ANSWERS
    }
    if given:
        return f"{digest}/{json.dumps(given, sort_keys=True, default=str)}"
    return digest


@contextlib.contextmanager
def _samples(path: str | os.PathLike[str] | None) -> Any:
    """Yield a list and write it as JSON lines at the end, even after an error; None writes
    nothing.
    """
    rows: list[JsonObject] = []
    try:
        yield rows
    finally:
        if path is not None and rows:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with (
                atomic_file(Path(path)) as temporary,
                open(temporary, "w", encoding="utf-8") as file,
            ):
                file.writelines(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)


def _file_problems(config: EvalConfig) -> list[str]:
    """Return obstacles to writing the results, before sampling. Makes the files' folders."""
    found = []
    for name, path in (("output", config.output), ("samples_file", config.samples_file)):
        if path is None:
            continue
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found.append(
                f"{name} is {path}: its folder cannot be made: {error}; choose another path"
            )
            continue
        if path.is_dir():
            found.append(f"{name} is {path}, a folder; give a file name")
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            found.append(
                f"{name} is {path}, but {path.parent} is not writable; choose another path"
            )
        elif (
            name == "output"
            and path.exists()
            and path.stat().st_size
            and complaints(lambda path=path: read_result(path))
        ):
            found.append(
                f"output is {path}, but that file is not an evaluation; choose another name, or "
                "remove it"
            )
    if (
        config.output is not None
        and config.samples_file is not None
        and Path(config.output) == Path(config.samples_file)
    ):
        found.append(f"output and samples_file are both {config.output}; use two names")
    return found

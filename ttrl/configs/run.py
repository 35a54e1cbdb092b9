"""Define TrainConfig, the settings of a whole run. Everything else comes from the tasks."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any, ClassVar, Literal

import yaml

from ttrl.configs.base import Config, Settings, absent_folder, settings
from ttrl.configs.data import AdvantageConfig, AdvantageKind, Share, TooLong
from ttrl.configs.logger_settings import logger_problems
from ttrl.configs.machines import auto_dtype, joined_problems, server_keys
from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.configs.recipe import OTHER_NAMES, GRPOConfig, TrainingConfig, read_settings
from ttrl.configs.vllm_arguments import (
    LORA_RANKS,
    argument_problems,
    is_argument,
    lora_rank_there,
    sampling_problems,
    takes_adapters,
)
from ttrl.errors import ConfigError
from ttrl.registries import OBJECTIVES

LIMIT_NAMES = ("mean", "p999", "ess", "outside")
"""The keys of `drift_limits`."""
SET_BY_THE_LOOP = (
    "model",
    "packed",
    "output_dir",
    "state",
    "iteration",
    "seed",
    "device",
    "dtype",
    "num_threads",
    "reference_model",
    "sampler_model",
    "sampler_version",
    "temperature",
    "lora_base",
    "lora_merge",
    "context",
    "follow",
    "free_memory",
    "hand_over",
    "save",
    "kept",
    "metric_logger",
)
"""Settings of the recipe chosen by the loop for each iteration, so `training` cannot hold them."""


@settings
class TrainConfig(Config):
    """A run: `train(TrainConfig(...), tasks, validation_tasks)`.

    >>> config = TrainConfig(
    ...     run="runs/sums", model="smollm2-135m", iterations=10, training={"lr": 1e-5}
    ... )
    >>> config.problems()
    []
    """

    run: str
    """The run folder. The same command on the same folder continues the run."""
    model: str
    """The model to start from: a folder in Hugging Face layout, a name of `ttrl models`, or one on
    the hub.
    """
    iterations: int
    """The number of iterations: sample, grade, train."""
    seed: int = 0
    """The seed of task order, dropout and sampling. vLLM's samples also depend on timing, unless
    sampling={"seed": 1} is set.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The trainer's device; "auto": CUDA if there is a GPU. vLLM serves on the device of its build.
    """
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of servers and trainer; "auto" is bf16 on CUDA and fp32 on CPU."""

    chat_template: str | None = None
    """A file or the text of a chat template, to replace the model's. It is used for servers,
    tokenization and every checkpoint.
    """

    # Sampling

    tasks_per_iteration: int = 32
    """Tasks sampled in an iteration. Their order is shuffled, and reshuffled every epoch."""
    overfit: int | None = None
    """Train on the first N tasks only, levels aside, and validate on these same tasks: a model that
    does not learn them shows a fault in settings or rewards. An iteration has at most N tasks.
    None: train on all tasks, and validate on the held-out ones.
    """
    samples_per_task: int = 16
    """Completions of each task. They form a group, and their rewards are compared. At least 2."""
    max_tokens: int = 1024
    """The longest completion, in tokens."""
    tokens_per_iteration: int | None = None
    """Completion tokens to sample in an iteration; None: until every completion has ended. The next
    iteration continues unfinished completions under its own policy, before new tasks. Only whole
    groups are trained on, and at least one: if none is finished, the budget is spent again.
    Requests in flight add a few more tokens.
    """
    max_staleness: int | None = None
    """With `tokens_per_iteration`: drop an unfinished group once its oldest token is older than
    this many iterations.
    """
    temperature: float = 1.0
    """Sampling temperature in training: sampler and trainer divide logits by it. Above 0."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Further sampling parameters of the OpenAI API or of vLLM, such as {"stop": ["</answer>"]}.
    ttrl refuses parameters with an effect on the distribution (top_p, penalties, …), because the
    trainer could not compute the probabilities of the sampled tokens.
    """
    early_stop: dict[str, float] | None = None
    """End unlikely completions, such as babble, by the model's own probabilities: {"alpha": 0.992,
    "threshold": -3.0}, see `ttrl.InferenceEarlyStop`, or {} for its defaults; None: let all end by
    themselves. Completions ended early are graded and trained on as they are. Completions are
    streamed, each in its own request, at several times the client's CPU time. With
    `tokens_per_iteration`, the mean of a continued completion goes on from its earlier tokens.
    """
    off_policy_steps: Literal[0, 1] = 0
    """1: while the trainer works on an iteration, the servers sample the next one with the weights
    from before the update, so the trained policy is one update ahead of the sampling one. On
    devices of their own, servers and trainer hardly wait for each other. The default of
    `training["off_policy"]` is then "token" (truncated importance sampling). 0: each iteration
    samples from the newest policy.
    """
    dynamic_sampling: int | None = None
    """Sample further tasks until this many groups of an iteration have a signal (DAPO); None:
    sample exactly `tasks_per_iteration` tasks. With `tokens_per_iteration`, only while the budget
    lasts.
    """
    max_extra_tasks: int | None = None
    """With `dynamic_sampling`: the most further tasks of an iteration; None: twice
    `tasks_per_iteration`.
    """
    curriculum: bool = False
    """Choose tasks by their last results. If all samples of a task got the same reward (solved, or
    hopeless), it misses the next round of all tasks, and after more such turns in a row up to 3, 7,
    15. Tasks never sampled come first.
    """
    level_up_at: float = 0.7
    """For tasks with levels (`ttrl.tasks.task.in_levels`). The lowest level is sampled first. The
    next level opens when the last `tasks_per_iteration` groups of the highest open one have this
    mean `validation_metric` (the reward, if training's graders have no such metric). From then on,
    every other task is of the new level.
    """
    cache: list[str] = field(default_factory=list)
    """Stores of completions: folders or URLs of object stores, such as "s3://bucket/rollouts". A
    repeated run with the same seed, settings and weights reads from them.
    """

    sample_files: bool = False
    """Write each completion of training to a text file while it is sampled, in the iteration's
    folder samples/ (tail -F shows them). A repeated task replaces its files. Completions are
    streamed, at several times the CPU time.
    """
    requests_log: bool = False
    """Append a line for each request, its cost and its end, to logs/requests.jsonl
    (requests.N.jsonl of each sampling worker).
    """

    # Validation

    validate_every: int = 1
    """Validate every validate_every-th policy, and the first and the last. With many held-out
    tasks, validation can take as long as everything else.
    """
    validation_samples: int = 1
    """Completions of each validation task. For k > 1, the metrics include "pass@k": at least one of
    them is right.
    """
    validation_temperature: float | None = None
    """None: 0 (greedy), to keep luck out of held-out results; with several `validation_samples`,
    `temperature`.
    """
    validation_metric: str = "reward"
    """The measure of the run's progress: "reward", or the name of one of the grader's metrics."""
    stop_at: float | None = None
    """End the run once the validation metric reaches this value."""

    # From rewards to advantages

    advantages: AdvantageKind = "std"
    """std": (reward - group mean) / group standard deviation (GRPO); "mean": reward - group mean
    (Dr. GRPO); "leave_one_out": reward - mean of the group's other samples (RLOO); "batch": (reward
    - group mean) / standard deviation over all groups (REINFORCE++).
    """
    advantage_std_floor: float = 1e-6
    """With "std" and "batch": the smallest standard deviation to divide by. Tiny differences of
    rewards then count for less. A warning reports its effect.
    """
    advantage_clip: float | None = None
    """Advantages are clipped to [-advantage_clip, advantage_clip]; None: no clipping."""
    reward_power: float = 1.0
    """First of all, rewards become sign(r)·|r|^reward_power: above 1, nearly perfect answers count
    for more.
    """
    surprise_bonus: float = 0.0
    """b: after that, rewards become (1 - b)·r + b·r·s, with s the completion's mean
    -log-probability in nats. Correct but unlikely answers then count for more. Groups with only
    correct answers then have a small signal too: with "std", set an `advantage_std_floor`.
    """
    surprise_until: str | None = None
    """A grader's metric with the number of characters up to the end of the final answer; s is then
    the mean up to there. None, and samples without the metric: the whole completion.
    """

    # From samples to packed rows

    seq_len: int = 4096
    """Length of a packed row, in tokens: at least as long as the longest prompt and completion
    together.
    """
    too_long: TooLong = "drop"
    """Handling of samples longer than a row: "drop" leaves it out, "truncate" cuts off its end (and
    with it the end-of-turn token), "extend" gives it a row as long as it needs, "error" ends the
    run. The metrics count such samples (`pack.dropped`).
    """
    share: Share = "tree"
    """Beginnings of samples to store once per row: everything in common, across tasks ("tree"),
    identical prompts ("prompt"), or none, for measurements. It does not change the training.
    """

    # Training

    training: dict[str, Any] | TrainingConfig | str = field(default_factory=dict)
    """Settings of the recipe: {"lr": 1e-6, "kl_coefficient": 0.01}, or GRPOConfig(lr=1e-6,
    kl_coefficient=0.01), with only the arguments you pass, or a file, such as one of
    recipe_configs/. See `ttrl.GRPOConfig`.
    """
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """How the loss weighs tokens: all equally, all samples equally, or divided by `constant_length`
    per sample. None: "token"; with objective "gspo", as in its paper, "sequence"."""
    constant_length: int | None = None
    """With `aggregation` "constant": the length in tokens to divide a sample's sum by, such as
    `max_tokens`.
    """
    placement: Literal["auto", "colocated", "split"] = "auto"
    """The GPUs of trainer and servers: "colocated", the same ones, in turn; "split", the first
    `nproc_per_node` for the trainer and the others for the servers. "auto": split if
    `off_policy_steps` makes both work at the same time and there are several GPUs, else colocated.
    No effect on CPUs. ttrl chooses missing settings to fit the GPUs: see
    docs/reference/what_fits.md.
    """
    nproc_per_node: int | None = None
    """Trainer processes on this machine, one per GPU; more than one shards the model over them.
    None: one per training GPU; on CPUs, one.
    """
    num_threads: int | None = None
    """CPU threads of each trainer process; None: the machine's cores divided by the processes."""
    trainer: Literal["resident", "once"] = "resident"
    """"resident": one trainer process for the whole run, with model, optimizer and compiled code
    warm; "once": a new process for each iteration. Both produce the same weights.
    """
    trainer_memory: Literal["auto", "keep", "free"] = "auto"
    """The resident trainer's memory between iterations: "keep" everything in place, or "free" the
    GPU's memory for the servers (model and optimizer wait in the CPU's). "auto": "free" if both
    share GPUs; "keep" on CPU and on a cluster.
    """
    trainer_restarts: int = 2
    """How often to restart a trainer in one iteration, after it was killed or lost contact to
    another machine.
    """

    # Servers. None of these changes the training, so a continued run may change all of them.

    servers: int | None = None
    """The number of vLLM servers to start on this machine. Several share its GPUs (each gets
    `tensor_parallel_size` × `pipeline_parallel_size`) or its cores. 0: use joined servers only.
    None: as many as there are GPUs for, or on CPUs one.
    """
    server: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM, such as {"gpu_memory_utilization": 0.6, "max_model_len": 8192}."""
    weight_sync: Literal["auto", "reload", "restart", "sleep", "memory"] = "auto"
    """How new weights reach the servers. "reload": in place. "restart": with a new server; the old
    one stops during training. "sleep": in place, with servers without GPU memory during training
    (vLLM's sleep, level 2). "memory": in place, from a resident trainer's memory on this machine,
    or else from files; servers on the trainer's GPUs sleep, too, if they take turns with it.
    "auto": "memory", if files are not needed and, with GPUs, the machine has the memory; else
    "sleep" if they take turns; else "reload".
    """
    save_every: int = 1
    """With weights from memory: write checkpoint and state of every n-th iteration only, and of the
    last one. A killed run trains again from the last written one, to the same bits, without new
    samples. `keep_checkpoints` and `keep_best` apply to written checkpoints.
    """
    joined_servers: list[str] = field(default_factory=list)
    """Servers started elsewhere with `ttrl serve`: ["http://10.0.0.7:8000"]. Their hosts find this
    run folder at the same path, unless `adapters` is "mirror". Their key is in the environment
    variable TTRL_SERVER_KEY, and never written here.
    """
    adapters: Literal["auto", "merged", "mirror"] = "auto"
    """With `training["lora_rank"]`: "auto", servers keep the starting model and receive each
    iteration's adapter, if vLLM can do so (not with DoRA, 4 bits, adapters on the head, or joined
    servers); "merged", they receive merged weights; "mirror", servers, joined ones too, keep the
    model and fetch adapters from the `mirror`: their hosts need not share the run's file system.
    """
    weight_check: Literal["all", "canary"] = "all"
    """Verification of a server after each sync: "all", every weight is compared with the
    checkpoint's files, and the canary; "canary", only the canary (for very large models: reading
    their files a second time takes long).
    """
    start_timeout: float | None = None
    """Seconds for a server to become healthy; None: 300, and one for each 100 MB of the model's
    files.
    """

    # Several machines. As with `nproc_per_node`, the update is the same for any number, up to
    # rounding.

    cluster: str | None = None
    """The Ray cluster of the run: "auto", "HOST:PORT" or "ray://HOST:PORT". Servers and, with
    `nnodes` above 1, the trainer start on its machines. The run outlives its program
    (docs/how-to/several_machines.md). None: without Ray.
    """
    sampling_workers: int | None = None
    """On a `cluster`: processes to sample, grade and tokenize for the run, each with a share of the
    servers. 0: the run does it itself, as always with `tokens_per_iteration`. None: 1 for 16
    servers, 0 for up to 32 of them.
    """
    nnodes: int = 1
    """Machines of the `cluster` for the trainer. They share the file system of the run folder."""
    join_timeout: int = 600
    """Seconds the trainer waits for all nodes at its start; then the run ends, and the same command
    continues it.
    """

    # Storage and reports. None of these changes the training either.
    keep_checkpoints: int = 3
    """The number of newest checkpoints and states to keep, in addition to the best and the last. At
    least 3: either of the last two iterations can then be trained again from its inputs.
    """
    keep_best: int = 1
    """The number of best checkpoints by `validation_metric` to keep, in addition to the newest
    `keep_checkpoints`.
    """
    keep_every: int | None = None
    """Keep the checkpoint of every n-th iteration for good; None: of none."""
    mirror: str | None = None
    """A copy of the run folder, made phase by phase during the run: an object store, such as
    "s3://bucket/runs/name", or a folder. On another machine without the run folder, the same call
    continues from the copy. If `run` is such an address itself, the run works in the local folder
    runs/name, and the address is the mirror.
    """
    drift: Literal["stop", "warn"] = "stop"
    """The reaction to a difference between sampler and trainer beyond rounding (`drift_limits`):
    "stop" ends the run with the worst tokens and the likely causes, "warn" reports them and
    continues.
    """
    drift_limits: dict[str, Any] = field(default_factory=dict)
    """Replaces the limits by dtype and device (ttrl/monitoring/drift.py): {"mean": nats, "p999":
    nats, "ess": share, "outside": share}; null for no limit. The limits apply only to tokens
    compared under their own sampling weights.
    """
    loggers: list[Any] = field(default_factory=list)
    """Further destinations of each iteration's metrics, besides metrics.jsonl: "stdout",
    "tensorboard", "wandb", "mlflow", "trackio", "swanlab", or a mapping with arguments, such as
    {"name": "wandb", "project": "sorting", "mode": "offline"} or, with torchtune's names for its
    own loggers, {"_component_": "torchtune.training.metric_logging.TensorBoardLogger", "log_dir":
    "logs"}. See docs/how-to/loggers.md.
    """

    gone: ClassVar[Mapping[str, str]] = {
        "rdzv_endpoint": ("several machines train on a Ray cluster (`cluster`)"),
        "joined_key_file": "the key is in the environment variable TTRL_SERVER_KEY",
        "joined_run": (
            "servers on other hosts find the run folder at the same path; mount it there, or "
            "make a "
            "symbolic link"
        ),
    }

    def __post_init__(self) -> None:
        if isinstance(self.training, str) and isinstance(
            found := read_settings(self.training), dict
        ):
            for name in ("device", "dtype", "num_threads"):  # of the whole run
                value = found.pop(name, None)
                if value is not None and getattr(self, name) in ("auto", None):
                    setattr(self, name, value)
            self.training = found
        elif isinstance(self.training, TrainingConfig):
            self.training = self.training.given()

    @property
    def recipe_settings(self) -> Settings:
        """Return `training` as a dictionary, its form in any finished config, unless its file
        cannot be read.
        """
        if isinstance(self.training, dict):
            return self.training
        return {}

    @classmethod
    def elsewhere(cls, name: str) -> str | None:
        """Return advice for a setting of the recipe, of vLLM or of another library."""
        name = OTHER_NAMES.get(name, name)
        if name in cls.names():
            return name
        if name in GRPOConfig.names() and name not in SET_BY_THE_LOOP:
            return f"training={{{name!r}: …}}"
        if is_argument(name):
            return f"server={{{name!r}: …}}"
        return None

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = self.at_least(
            1,
            "iterations",
            "tasks_per_iteration",
            "samples_per_task",
            "max_tokens",
            "tokens_per_iteration",
            "overfit",
            "max_staleness",
            "validation_samples",
            "seq_len",
            "nproc_per_node",
            "num_threads",
            "constant_length",
            "dynamic_sampling",
            "max_extra_tasks",
            "keep_best",
            "keep_every",
            "save_every",
            "validate_every",
        )
        found += self.at_least(
            0, "temperature", "validation_temperature", "seed", "trainer_restarts", "servers"
        )
        found += (
            self.at_least(3, "keep_checkpoints")
            + self.above_zero("start_timeout")
            + self.at_least(0, "sampling_workers")
        )
        found += self._sampling_problems() + self._advantage_problems() + self._training_problems()
        found += (
            self.watch_problems()
            + self.server_problems()
            + self.node_problems()
            + self._saving_problems()
        )
        if self.mirror is not None and not self.mirror.strip():
            found.append(
                'mirror is empty; give an address such as "s3://bucket/runs/name", or leave it out'
            )
        for name in ("sampling", "training", "server", "drift_limits", "loggers"):
            try:
                yaml.safe_dump(getattr(self, name))
            except yaml.YAMLError as error:
                found.append(
                    f"{name} holds {error.args[-1]!r}, and config.yaml cannot; use plain numbers, "
                    "strings and lists"
                )
        return found

    def _sampling_problems(self) -> list[str]:
        found = []
        if self.temperature == 0:
            found.append(
                "temperature is 0: greedy samples of a task are equal, and teach nothing; set it "
                "above 0"
            )
        if self.samples_per_task == 1:
            found.append(
                "samples_per_task is 1; advantages compare the samples of a task: set it to 2 or "
                "more"
            )
        if self.max_staleness is not None and self.tokens_per_iteration is None:
            found.append(
                "max_staleness is set without tokens_per_iteration, but completions get old only "
                "with a budget; set both, or none"
            )
        if self.early_stop is not None:
            unknown = self.early_stop.keys() - {"alpha", "threshold"}
            found += [
                f"early_stop: unknown key {name!r}; choose from 'alpha' and 'threshold'"
                for name in sorted(unknown)
            ]
        if self.dynamic_sampling is None:
            if self.max_extra_tasks is not None:
                found.append("max_extra_tasks is set without dynamic_sampling; set both, or none")
        elif self.dynamic_sampling > (most := self.tasks_per_iteration + self.extra_task_limit):
            found.append(
                f"dynamic_sampling is {self.dynamic_sampling}, but an iteration has at most "
                f"{most} tasks; raise max_extra_tasks"
            )
        if self.off_policy_steps and self.weight_sync == "sleep":
            found.append(
                "off_policy_steps is 1 with weight_sync 'sleep', but the server cannot sleep: it "
                "samples during training. Choose weight_sync 'reload', or off_policy_steps 0"
            )
        if 0 < self.seq_len < self.max_tokens and self.too_long in ("drop", "error"):
            found.append(
                f"seq_len is {self.seq_len}, below max_tokens {self.max_tokens}: raise it, or set "
                "too_long to 'truncate'"
            )
        return found + sampling_problems(self.sampling)

    def _advantage_problems(self) -> list[str]:
        try:
            self.advantage_config()
        except ConfigError as error:  # two of its fields have a longer name here
            return [
                f"advantage_{line}" if line.startswith(("std_floor", "clip")) else line
                for line in error.problems
            ]
        return []

    def _training_problems(self) -> list[str]:
        found = [
            f"training: {name!r} is {whose}"
            for name in self.recipe_settings
            if (whose := _not_of_training(name))
        ]
        if isinstance(self.training, str):
            found.append(f"training is {self.training!r}, {read_settings(self.training)}")
        if (self.aggregation == "constant") != (self.constant_length is not None):
            found.append(
                f"aggregation is {self.aggregation!r} with constant_length {self.constant_length}; "
                "'constant' needs a length, the others take none"
            )
        try:
            recipe = self.recipe_config({"seed": 0})  # a wrong seed is reported by its own name
        except ConfigError as error:
            return found + [f"training: {problem}" for problem in error.problems]
        if self.adapters == "mirror" and (
            recipe.lora_merge or not self.joined_servers or not (self.mirror or "://" in self.run)
        ):
            rank = (
                f"lora_rank up to {LORA_RANKS[-1]} (a third of that for a model not downloaded yet)"
            )
            kind = f"{rank}, and neither DoRA, 4 bits, adapters on the head nor GPT-2"
            found.append(
                "adapters is 'mirror', but that needs a mirror, joined_servers, and adapters "
                f"supported by vLLM ({kind})"
            )
        if not (recipe.value_head or recipe.token_rewards == "implicit"):
            return found
        if recipe.value_head:
            maker = "value_head"
        else:
            maker = "token_rewards 'implicit'"
        defaults = self.defaults()
        return found + [
            f"{name} is {getattr(self, name)!r}, but has no effect with {maker}: then the recipe "
            "computes advantages of graders' rewards; leave it out"
            for name in (
                "advantages",
                "advantage_std_floor",
                "advantage_clip",
                "reward_power",
                "surprise_bonus",
            )
            if getattr(self, name) != defaults[name]
        ]

    def _saving_problems(self) -> list[str]:
        if self.save_every == 1:
            return []
        why = self.files_because
        if self.weight_sync not in ("auto", "memory"):
            why = (
                f"weight_sync is {self.weight_sync!r}, so servers read the files of each iteration"
            )
        found = []
        if why is not None:
            found.append(f"save_every is {self.save_every}, but {why}: leave it at 1")
        if self.keep_every is not None and self.keep_every % self.save_every:
            found.append(
                f"keep_every is {self.keep_every}, but only multiples of save_every "
                f"({self.save_every}) are written; choose one"
            )
        return found

    def watch_problems(self) -> list[str]:
        """Return the mistakes in drift limits and loggers, one line each."""
        found = []
        for name, value in self.drift_limits.items():
            if name not in LIMIT_NAMES:
                found.append(
                    f"drift_limits: unknown limit {name!r}; choose from {', '.join(LIMIT_NAMES)}"
                )
            elif value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
            ):
                found.append(
                    f"drift_limits: {name} is {value!r}; it must be above 0, or null for no limit"
                )
        return found + [problem for entry in self.loggers for problem in logger_problems(entry)]

    def server_problems(self) -> list[str]:
        """Return the mistakes in the servers to start or join, one line each."""
        found = joined_problems(self.joined_servers)
        if self.cluster is None and self.sampling_workers:
            found.append(
                f"sampling_workers is {self.sampling_workers}, but there is no cluster; leave it "
                "out"
            )
        if self.cluster is not None and self.weight_sync not in ("auto", "reload"):
            found.append(
                f"weight_sync is {self.weight_sync!r}, but the servers of a cluster read files: "
                "choose 'auto' or 'reload'"
            )
        if self.servers_in_all < 1:
            found.append(
                "servers is 0 and joined_servers is empty, so no server would sample; set one of "
                "them"
            )
        return found

    def local_problems(self) -> list[str]:
        """Return the installed vLLM's objections, one line each."""
        return [f"server: {problem}" for problem in argument_problems(self.server)]

    def absent(self) -> list[str]:
        """Return a line about the model if it can only be a folder and does not exist."""
        return absent_folder(self.model)

    def node_problems(self) -> list[str]:
        """Return the mistakes in training on several machines, one line each."""
        found = self.at_least(1, "nnodes", "join_timeout")
        if self.nnodes <= 1:
            return found
        if self.cluster is None:
            found.append(
                f"nnodes is {self.nnodes}, but that needs a Ray cluster: set `cluster` "
                "(docs/how-to/several_machines.md)"
            )
        if self.trainer != "resident":
            found.append(
                f"nnodes is {self.nnodes}, but the other nodes follow a resident trainer: set "
                "trainer to 'resident'"
            )
        return found

    @property
    def extra_task_limit(self) -> int:
        """How many further tasks dynamic sampling may take in an iteration."""
        if self.max_extra_tasks is not None:
            return self.max_extra_tasks
        return 2 * self.tasks_per_iteration

    @property
    def server_stops(self) -> bool:
        """Whether the server is stopped, or sleeps, while the trainer works."""
        return self.server_sleeps or (self.weight_sync == "restart" and not self.off_policy_steps)

    @property
    def server_sleeps(self) -> bool:
        """Whether the server frees its GPUs' memory while the trainer works."""
        if self.off_policy_steps or self.weight_sync not in ("sleep", "memory"):
            return False
        return self.weight_sync == "sleep" or (self.device != "cpu" and self.placement != "split")

    @property
    def shares_gpu(self) -> bool:
        """Whether trainer and servers take turns on the same GPUs, so neither may start while the
        other loads.
        """
        return self.device == "cuda" and self.placement != "split" and self.servers_here > 0

    @property
    def context(self) -> int | None:
        """The servers' longest sequence, if `server` sets it; None: the model's own."""
        length = self.server.get("max_model_len")
        if isinstance(length, int) and length > 0:
            return length
        return None

    @property
    def processes(self) -> int:
        """Trainer processes on all nodes."""
        return self.processes_here * self.nnodes

    @property
    def processes_here(self) -> int:
        """Trainer processes on this machine."""
        if self.nproc_per_node is None:
            return 1
        return self.nproc_per_node

    @property
    def servers_here(self) -> int:
        """Servers started on this machine."""
        return 0 if self.cluster is not None else self._started

    @property
    def replicas(self) -> int:
        """Servers started on machines of the cluster."""
        return 0 if self.cluster is None else self._started

    @property
    def _started(self) -> int:
        """Servers that the run starts anywhere."""
        return 1 if self.servers is None else self.servers

    @property
    def servers_in_all(self) -> int:
        """Servers of the run, on any machine."""
        return self._started + len(self.joined_servers)

    @property
    def resolved_weight_sync(self) -> Literal["reload", "restart", "sleep", "memory"]:
        """The meaning of `weight_sync` without a choice (`ttrl.plans.open_choices`)."""
        if self.weight_sync != "auto":
            return self.weight_sync
        if self.device == "cpu" and self.files_because is None:
            return "memory"
        return "reload"

    @property
    def files_because(self) -> str | None:
        """The reason for writing new weights as files; None if all servers can take them from the
        trainer's memory.
        """
        return next(iter(self._file_readers(all_of_them=False)), None)

    @property
    def hands_over(self) -> bool:
        """Whether the trainer holds new weights out in memory, for some of the servers at least."""
        return self.resolved_weight_sync == "memory" and not any(
            self._file_readers(all_of_them=True)
        )

    def _file_readers(self, *, all_of_them: bool) -> Iterator[str]:
        """Yield the readers of files, in words; with `all_of_them`, only reasons against any
        transfer from memory.
        """
        if self.trainer != "resident":
            yield "trainer 'once' has ended by then"
        if self.nnodes > 1:
            yield "several machines train"
        if self.recipe_settings.get("lora_rank") is not None:
            yield "an adapter's files are small, and vLLM loads adapters only from files"
        if self.cluster is not None:
            yield "the servers of a cluster read files"
        if self.servers == 0 or (self.joined_servers and not all_of_them):
            yield "joined servers read files"
        if self.cache and not all_of_them:
            yield "the cache is keyed by the files' content"

    def joined_keys(self) -> dict[str, str]:
        """Return the key of each joined server. Raises ConfigError if one is unknown."""
        return server_keys(self.joined_servers)

    def policy_of_rollouts(self, number: int) -> int:
        """Return the iteration of the policy for the rollouts of iteration `number`."""
        return max(0, number - 1 - self.off_policy_steps)

    def rollouts_of_policy(self, number: int) -> list[int]:
        """Return the iterations with rollouts by the policy after iteration `number`."""
        return [
            later
            for later in range(number + 1, number + 3)
            if self.policy_of_rollouts(later) == number
        ]

    @property
    def resolved_validation_temperature(self) -> float:
        """The temperature of held-out samples."""
        if self.validation_temperature is not None:
            return self.validation_temperature
        if self.validation_samples == 1:
            return 0.0
        return self.temperature

    @property
    def resolved_aggregation(self) -> Literal["token", "sequence", "constant"]:
        """The meaning of `aggregation`."""
        if self.aggregation is not None:
            return self.aggregation
        objective = self.recipe_settings.get("objective", ObjectiveConfig.objective)
        default: Literal["token", "sequence", "constant"]
        default = OBJECTIVES[objective].defaults.get("aggregation", "token")
        return default

    def resolved_trainer_memory(self, device: str) -> Literal["keep", "free"]:
        """Return the meaning of `trainer_memory` on a device, "cpu" or "cuda"."""
        if self.trainer_memory != "auto":
            return self.trainer_memory
        if device == "cuda" and self.placement != "split" and self.servers_here:
            return "free"
        return "keep"

    def advantage_config(self) -> AdvantageConfig:
        """Return how rewards become advantages. Raises ConfigError."""
        return AdvantageConfig(
            kind=self.advantages,
            std_floor=self.advantage_std_floor,
            clip=self.advantage_clip,
            reward_power=self.reward_power,
            surprise_bonus=self.surprise_bonus,
            surprise_until=self.surprise_until,
        )

    @property
    def gives_adapters(self) -> bool:
        """Whether the servers get a run's adapters on top of the base, with no use of merged
        weights: see `adapters`.
        """
        return not self.recipe_config({}).lora_merge

    @property
    def shares_prompts(self) -> bool:
        """Whether servers compute a prompt once for all its samples, regardless of their prefix
        cache: those on CPUs, without adapters (`ttrl.vllm_worker.shared_prompts`)."""
        return self.device == "cpu" and not self.gives_adapters

    def _can_serve_adapters(self, recipe: GRPOConfig) -> bool:
        return (
            recipe.lora_rank is not None
            and lora_rank_there(self.model, recipe.lora_rank) <= LORA_RANKS[-1]
            and takes_adapters(self.model, self.device)
            and (self.adapters == "mirror" or (self.adapters == "auto" and not self.joined_servers))
            and recipe.lora_kind == "lora"
            and recipe.lora_base_dtype != "nf4"
            and "output" not in recipe.lora_targets
        )

    def recipe_config(self, values: Settings) -> GRPOConfig:
        """Return the recipe's config: `training`, and `values`, set by the loop for an iteration.
        Raises ConfigError.
        """
        usual = {"model": "", "packed": "", "output_dir": "", "reference_model": ""}
        if self.off_policy_steps:
            usual["off_policy"] = "token"
        given = {
            key: value for key, value in self.recipe_settings.items() if not _not_of_training(key)
        }
        recipe = GRPOConfig.parse({**usual, **given, "seed": self.seed, **values}, "training")
        recipe.lora_merge = not self._can_serve_adapters(recipe)
        return recipe

    @classmethod
    def defaults(cls) -> Settings:
        """Return the fields with a default, as config.yaml would hold them."""
        values = cls(run="", model="", iterations=1).to_dict()
        return {
            name: value
            for name, value in values.items()
            if name not in ("run", "model", "iterations")
        }

    def resolved(self, cuda: bool) -> "TrainConfig":
        """Return this config with every unset value filled in, for config.yaml to record the
        run.
        """
        device = self.device if self.device != "auto" else "cuda" if cuda else "cpu"
        if self.device != device:
            return replace(self, device=device).resolved(cuda)
        return TrainConfig.parse(
            self.to_dict()
            | {
                "dtype": self.dtype if self.dtype != "auto" else auto_dtype(device == "cuda"),
                "num_threads": self.num_threads
                or max(1, (os.cpu_count() or 1) // self.processes_here),
                "nproc_per_node": self.processes_here,
                "servers": self._started,
                "weight_sync": self.resolved_weight_sync,
                "save_every": self.save_every if self.hands_over else 1,
                "trainer_memory": self.resolved_trainer_memory(device),
                "validation_temperature": self.resolved_validation_temperature,
                "aggregation": self.resolved_aggregation,
            },
            "config",
        )


def _not_of_training(name: str) -> str:
    """Return the owner of a setting `training` cannot hold; "" for the recipe's, and for unknown
    ones.
    """
    if name == "metric_logger":
        return "for the recipe alone; set the run's loggers"
    if name in SET_BY_THE_LOOP:
        return "set by the loop"
    if name in TrainConfig.names() - GRPOConfig.names():
        return "a setting of the run, not of its recipe"
    return ""

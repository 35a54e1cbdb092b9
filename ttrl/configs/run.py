"""The settings of a whole run. What is not here comes from the tasks."""

import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import yaml

from ttrl.configs.base import Config, at_least
from ttrl.configs.data import AdvantageConfig, Share, TooLong
from ttrl.configs.loggers import logger_problems
from ttrl.configs.machines import NodesConfig, ServersConfig
from ttrl.configs.recipe import GRPOConfig
from ttrl.errors import ConfigError

OFF_POLICY_CORRECTION = "token"
"""What `training["off_policy"]` is with `off_policy_steps` where nobody says otherwise: truncated importance sampling."""


@dataclass(kw_only=True)
class OrderConfig(Config):
    """A part of TrainConfig."""

    off_policy_steps: Literal[0, 1] = 0
    """1: while the trainer works on an iteration, the server samples the next one's rollouts, with the weights before that
    update; so the policy that is trained is one update ahead of the one that sampled. Where they have devices of their own,
    server and trainer then hardly wait for each other. The loss knows what the tokens were sampled with: `training["off_policy"]`
    is "token" then (truncated importance sampling) unless it is given. 0: each iteration samples from the newest policy."""

    def order_problems(self, weight_sync: str) -> list[str]:
        """What is wrong with these settings, a line each."""
        if self.off_policy_steps and weight_sync == "sleep":
            return [
                "off_policy_steps is 1 with weight_sync 'sleep'; the server samples while the trainer works, so it cannot sleep: "
                "choose weight_sync 'reload', or off_policy_steps 0"
            ]
        return []

    def policy_of_rollouts(self, number: int) -> int:
        """The iteration whose policy samples the rollouts of iteration `number`."""
        return max(0, number - 1 - self.off_policy_steps)

    def rollouts_of_policy(self, number: int) -> list[int]:
        """The iterations whose rollouts are sampled by the policy after iteration `number`: the inverse."""
        return [later for later in range(number + 1, number + 3) if self.policy_of_rollouts(later) == number]

    def correction(self) -> dict[str, Any]:
        """Settings of the recipe that go with the order, where the person gives no others."""
        return {"off_policy": OFF_POLICY_CORRECTION} if self.off_policy_steps else {}


@dataclass(kw_only=True)
class StorageConfig(Config):
    """A part of TrainConfig. No setting here changes what is trained, so all of them may change when a run is continued."""

    keep_best: int = 1
    """How many of the best checkpoints by `validation_metric` are kept, beside the newest `keep_checkpoints`."""
    keep_every: int | None = None
    """The checkpoint of every so manieth iteration is kept for good; None: of none."""
    mirror: str | None = None
    """Where the run folder is copied to while the run goes on, phase by phase: an object store, such as "s3://bucket/runs/name",
    or a folder. The same call on another machine, where the run folder is not there, continues from that copy. With `run` an
    address itself, such as "s3://bucket/runs/name", the folder runs/name works here, and the address is the mirror."""

    def storage_problems(self) -> list[str]:
        """What is wrong with them, one line each."""
        found = at_least(1, keep_every=self.keep_every, keep_best=self.keep_best)
        if self.mirror is not None and not self.mirror.strip():
            found.append('mirror is empty; give an address such as "s3://bucket/runs/name", or leave it out')
        return found


@dataclass(kw_only=True)
class TrainerConfig(Config):
    """A part of TrainConfig. No setting here changes what is trained, so all of them may change when a run is continued."""

    trainer: Literal["resident", "once"] = "resident"
    """"resident": one trainer process for the whole run, with model, optimizer and compiled code kept warm; "once": a process of
    its own for each iteration. Both give the same weights."""
    trainer_memory: Literal["auto", "keep", "free"] = "auto"
    """What a resident trainer does between iterations: "keep" everything where it is, or "free" the GPU's memory for the server
    (model and optimizer wait in the CPU's). "auto": free on CUDA, where the server shares the device; keep on CPU."""
    trainer_restarts: int = 2
    """How often in one iteration a trainer that was killed, or has lost another machine, is started again before the run ends."""

    def resolved_trainer_memory(self, device: str) -> Literal["keep", "free"]:
        """`trainer_memory` on a device, "cpu" or "cuda"."""
        if self.trainer_memory != "auto":
            return self.trainer_memory
        return "free" if device == "cuda" else "keep"


LIMIT_NAMES = ("mean", "p999", "ess", "outside")
"""What `drift_limits` may hold."""


@dataclass(kw_only=True)
class WatchingConfig(Config):
    """A part of TrainConfig."""

    drift: Literal["stop", "warn"] = "stop"
    """What becomes of a run whose sampler and trainer are further apart than rounding explains (`drift_limits`): it ends with the
    worst tokens and the likely causes, or says so and goes on."""
    drift_limits: dict[str, Any] = field(default_factory=dict)
    """Instead of the limits by dtype and device (ttrl/monitoring/drift.py): {"mean": nats, "p999": nats, "ess": share, "outside":
    share}; null for no limit. Held to them are tokens that were compared under the weights that sampled them, and no others."""
    loggers: list[Any] = field(default_factory=list)
    """Where each iteration's metrics go beside metrics.jsonl: "stdout", "tensorboard", "wandb", or a mapping with arguments, such
    as {"name": "wandb", "project": "sorting", "mode": "offline"} or, with torchtune's names for its own loggers,
    {"_component_": "torchtune.training.metric_logging.TensorBoardLogger", "log_dir": "logs"}. See docs/watching.md."""

    def watch_problems(self) -> list[str]:
        """What is wrong with them, one line each."""
        found = []
        for name, value in self.drift_limits.items():
            if name not in LIMIT_NAMES:
                found.append(f"drift_limits: unknown limit {name!r}; there are {', '.join(LIMIT_NAMES)}")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                found.append(f"drift_limits: {name} is {value!r}; it must be above 0, or null for no limit")
        return found + [problem for entry in self.loggers for problem in logger_problems(entry)]


# What the loop itself puts into each iteration's recipe config, so that `training` cannot.
_SET_BY_THE_LOOP = (
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
)
# Sampling parameters that draw from another distribution than softmax(logits / temperature), which the trainer computes.
_OTHER_DISTRIBUTIONS = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "response_format",
)


@dataclass(kw_only=True)
class TrainConfig(NodesConfig, OrderConfig, ServersConfig, StorageConfig, TrainerConfig, WatchingConfig, Config):
    """A run: `train(TrainConfig(...), tasks, validation_tasks)`."""

    run: str
    """The run folder. The same command on the same folder continues where it was."""
    model: str
    """The model to start from: a folder in Hugging Face layout, or a name on the hub."""
    iterations: int
    """How many times to sample, grade and train."""
    tasks_per_iteration: int = 32
    samples_per_task: int = 16
    max_tokens: int = 1024
    """The longest completion, in tokens."""
    tokens_per_iteration: int | None = None
    """Completion tokens to sample in an iteration; None: until all completions have ended. What is unfinished then is continued
    in the next iteration, by its policy, before new tasks are begun; only whole groups are trained on, and at least one: where
    none is finished, another such budget is spent. A few tokens more come from requests under way."""
    max_staleness: int | None = None
    """With `tokens_per_iteration`: unfinished groups whose oldest token is older than so many iterations are dropped."""
    temperature: float = 1.0
    sampling: dict[str, Any] = field(default_factory=dict)
    """Further sampling parameters of the OpenAI API or of vLLM, such as {"stop": ["</answer>"]}. Those that change the
    distribution (top_p, penalties, …) are refused: the trainer could not tell how likely the sampled tokens were."""
    cache: list[str] = field(default_factory=list)
    """Where completions are kept and looked for as well: folders or URLs of object stores, such as "s3://bucket/rollouts". A run
    that is made again with the same seed, settings and weights is then served from there."""
    validation_samples: int = 1
    """Completions of each validation task."""
    validation_temperature: float | None = None
    """None: as in training, so that validation shows the policy that is trained; 0: greedy."""
    validation_metric: str = "reward"
    """What the run's progress is measured by: "reward", or the name of one of the grader's metrics."""
    stop_at: float | None = None
    """Ends the run early, after the iteration whose validation metric reaches this."""
    advantages: Literal["std", "mean", "leave_one_out", "batch"] = "std"
    """(reward - group mean) / group standard deviation (GRPO), reward - group mean alone (Dr. GRPO), reward - mean of the others
    of the group (RLOO), or reward - group mean divided by the standard deviation of that over all groups (REINFORCE++)."""
    advantage_std_floor: float = 1e-6
    """With "std" and "batch": standard deviations below this are taken to be this, with a warning; so that rewards that hardly
    differ do not count as much as those that do."""
    advantage_clip: float | None = None
    """Advantages are cut to [-advantage_clip, advantage_clip]; None: not at all."""
    reward_power: float = 1.0
    """Before all else, rewards become sign(r)·|r|^reward_power: above 1, nearly perfect answers count for more."""
    surprise_bonus: float = 0.0
    """b: after that, rewards become (1 - b)·r + b·r·s with s the completion's mean -log-probability in nats, so that right
    answers that were unlikely count for more. Groups that are all right then have a signal too, however small: with "std", give
    an `advantage_std_floor`."""
    surprise_until: str | None = None
    """The name of a metric of the grader: how many characters of the answer there are up to the end of its last answer; s is then
    the mean up to there. None, and samples without that metric: up to the end."""
    dynamic_sampling: int | None = None
    """Samples further tasks until so many groups of an iteration have a signal (DAPO); None: `tasks_per_iteration` are sampled,
    whatever comes of them. With `tokens_per_iteration`, only while the budget lasts."""
    max_extra_tasks: int | None = None
    """With `dynamic_sampling`: how many further tasks an iteration may have; None: twice `tasks_per_iteration`."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How tokens weigh in the loss: all alike, all samples alike, or divided by `constant_length` per sample."""
    constant_length: int | None = None
    seq_len: int = 4096
    """Length of a packed row, in tokens; at least the longest prompt and completion together."""
    too_long: TooLong = "drop"
    """What becomes of a sample that is longer than a row: "drop" leaves it out, "truncate" cuts off its end (with its end-of-turn
    token), "extend" gives it a row as long as it needs, "error" ends the run. The metrics count them (`pack.dropped`)."""
    share: Share = "tree"
    """Which beginnings of samples are stored once per row: all that they have in common, of whatever tasks ("tree"), those of the
    same prompt ("prompt"), or none, for measurements. What is trained is the same."""
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of the recipe (ttrl.configs.GRPOConfig): lr, kl_coefficient, updates_per_iteration, rows_per_microbatch, …"""
    nproc_per_node: int = 1
    """Trainer processes on this machine: one per GPU; more than one shards the model over them."""
    num_threads: int | None = None
    """CPU threads of each trainer process; None: the machine's cores divided by the processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of server and trainer alike; "auto" is bf16 on CUDA and fp32 on CPU."""
    weight_sync: Literal["reload", "restart", "sleep"] = "reload"
    """How new weights reach the servers: in place; by a new server, which is stopped while the trainer works; or in place, with
    servers that give back their GPU's memory while the trainer works (vLLM's sleep, level 2; has not run on a GPU)."""
    server: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM, such as {"gpu_memory_utilization": 0.6, "max_model_len": 8192}."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints and states are kept, beside the best and the last; at least 3, so that either of the
    last two iterations can be trained again from its inputs."""
    seed: int = 0

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = at_least(
            1,
            iterations=self.iterations,
            tasks_per_iteration=self.tasks_per_iteration,
            samples_per_task=self.samples_per_task,
            max_tokens=self.max_tokens,
            tokens_per_iteration=self.tokens_per_iteration,
            max_staleness=self.max_staleness,
            validation_samples=self.validation_samples,
            seq_len=self.seq_len,
            nproc_per_node=self.nproc_per_node,
            num_threads=self.num_threads,
            constant_length=self.constant_length,
            dynamic_sampling=self.dynamic_sampling,
            max_extra_tasks=self.max_extra_tasks,
        )
        found += at_least(0, temperature=self.temperature, validation_temperature=self.validation_temperature, seed=self.seed)
        found += at_least(0, trainer_restarts=self.trainer_restarts)
        found += at_least(3, keep_checkpoints=self.keep_checkpoints)
        if self.temperature == 0:
            found.append("temperature is 0; greedy samples of a task are all the same, so nothing could be learned from them")
        if self.samples_per_task == 1:
            found.append("samples_per_task is 1; advantages compare the samples of a task, so there must be at least 2")
        if self.max_staleness is not None and self.tokens_per_iteration is None:
            found.append("max_staleness is given without tokens_per_iteration; no completion gets old without a budget")
        try:
            self.advantage_config()
        except ConfigError as error:
            # Their names have a word more here.
            found += [f"advantage_{line}" if line.startswith(("std_floor", "clip")) else line for line in error.problems]
        if self.dynamic_sampling is None:
            if self.max_extra_tasks is not None:
                found.append("max_extra_tasks is given without dynamic_sampling; they go together")
        elif self.dynamic_sampling > (most := self.tasks_per_iteration + self.extra_task_limit):
            found.append(
                f"dynamic_sampling is {self.dynamic_sampling}, but an iteration has at most {most} tasks; raise max_extra_tasks"
            )
        if (self.aggregation == "constant") != (self.constant_length is not None):
            found.append(f"aggregation {self.aggregation!r} with constant_length {self.constant_length}; they go together")
        for name in ("n", "temperature", "max_tokens", "logprobs", "model", "messages"):
            if name in self.sampling:
                found.append(f"sampling: {name!r} has a setting of its own, or is set by ttrl")
        extra_body = self.sampling.get("extra_body")
        for name in (*self.sampling, *(extra_body if isinstance(extra_body, dict) else ())):
            if name in _OTHER_DISTRIBUTIONS:
                found.append(f"sampling: {name!r} draws from another distribution than the one that is trained")
        for name in _SET_BY_THE_LOOP:
            if name in self.training:
                found.append(f"training: {name!r} is set by the loop")
        try:
            recipe = self.recipe_config({"seed": 0})  # a wrong seed was named above
        except ConfigError as error:
            found += [f"training: {problem}" for problem in error.problems]
        else:
            found += self._without_effect(recipe)
        found += self.watch_problems() + self.storage_problems() + self.server_problems()
        found += self.order_problems(self.weight_sync) + self.node_problems()
        for name in ("sampling", "training", "server", "drift_limits", "loggers"):
            try:
                yaml.safe_dump(getattr(self, name))
            except yaml.YAMLError as error:
                found.append(f"{name} holds what config.yaml cannot ({error.args[-1]!r}); use plain numbers, strings and lists")
        return found

    def _without_effect(self, recipe: GRPOConfig) -> list[str]:
        """Settings of advantages that the recipe makes anew, from the graders' rewards."""
        if not (recipe.value_head or recipe.token_rewards == "implicit"):
            return []
        maker = "value_head" if recipe.value_head else "token_rewards 'implicit'"
        names = ("advantages", "advantage_std_floor", "advantage_clip", "reward_power", "surprise_bonus")
        defaults = self.defaults()
        return [
            f"{name} is {getattr(self, name)!r}, which does nothing with {maker}: the recipe makes advantages of graders' rewards"
            for name in names
            if getattr(self, name) != defaults[name]
        ]

    @property
    def extra_task_limit(self) -> int:
        """How many further tasks dynamic sampling may take in an iteration."""
        return self.max_extra_tasks if self.max_extra_tasks is not None else 2 * self.tasks_per_iteration

    @property
    def server_stops(self) -> bool:
        """Whether the server is stopped, or sleeps, while the trainer works."""
        return self.weight_sync in ("restart", "sleep") and not self.off_policy_steps

    @property
    def context(self) -> int | None:
        """The longest sequence that the server takes, where `server` says it; None: the model's own."""
        length = self.server.get("max_model_len")
        return length if isinstance(length, int) and length > 0 else None

    def advantage_config(self) -> AdvantageConfig:
        """How rewards become advantages. Raises ConfigError."""
        return AdvantageConfig(
            kind=self.advantages,
            std_floor=self.advantage_std_floor,
            clip=self.advantage_clip,
            reward_power=self.reward_power,
            surprise_bonus=self.surprise_bonus,
            surprise_until=self.surprise_until,
        )

    def recipe_config(self, values: dict[str, Any]) -> GRPOConfig:
        """The recipe's config: `training`, and what the loop sets for an iteration. Raises ConfigError."""
        free = {key: value for key, value in self.training.items() if key not in _SET_BY_THE_LOOP}
        placeholders = {"model": "", "packed": "", "output_dir": "", "reference_model": ""}
        return GRPOConfig.parse({**placeholders, **self.correction(), **free, "seed": self.seed, **values}, "training")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The fields that have a default, as config.yaml would hold them."""
        needed = {field.name: "" for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
        return {name: value for name, value in cls(**needed).to_dict().items() if name not in needed}

    def resolved(self, cuda: bool) -> "TrainConfig":
        """This config with everything that depends on the machine written out, so that config.yaml says what was run."""
        device = self.device if self.device != "auto" else "cuda" if cuda else "cpu"
        return TrainConfig.parse(
            self.to_dict()
            | {
                "device": device,
                "dtype": self.dtype if self.dtype != "auto" else "bf16" if device == "cuda" else "fp32",
                "num_threads": self.num_threads or max(1, (os.cpu_count() or 1) // self.nproc_per_node),
                "trainer_memory": self.resolved_trainer_memory(device),
            },
            "config",
        )

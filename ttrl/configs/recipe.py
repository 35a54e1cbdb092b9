"""The settings of `tune run ttrl/grpo_recipe` and `tune run ttrl/sft_recipe`: the shared ones, then
each one's own.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

import yaml

from ttrl.configs.base import Config, absent_folder, required, settings
from ttrl.configs.logger_settings import logger_problems
from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.families.values import has_experts
from ttrl.registries import OBJECTIVES

Decoder = Literal["auto", "torchtune", "transformers"]
LoRATarget = Literal["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3", "output"]

PROGRESS_VARIABLE = "TTRL_PROGRESS_FILE"
"""Environment variable with the file of a recipe's progress."""
STORE_VARIABLE = "TTRL_STORE_FILE"
"""The same for the file through which a machine's processes find each other; without it they follow
torchrun.
"""
NF4_BLOCK = 64
"""Numbers with a shared scale in a base held in 4 bits."""
MATRIX_NAMES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q_a_proj", "q_b_proj", "qkv_proj"),
    "k_proj": ("kv_a_proj_with_mqa", "qkv_proj"),
    "v_proj": ("kv_b_proj", "qkv_proj"),
    "output_proj": ("o_proj", "out_proj", "dense"),
    "w1": ("gate_proj", "gate_up_proj", "fc1"),
    "w2": ("down_proj", "fc2"),
    "w3": ("up_proj", "gate_up_proj"),
    "output": (),
}
"""Names of the matrices with adapters in transformers' classes. Some hold several in one."""
OTHER_NAMES = {
    **dict.fromkeys(("epochs", "num_train_epochs", "max_steps", "steps"), "iterations"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens"), "max_tokens"),
    "learning_rate": "lr",
    "beta": "kl_coefficient",
    **dict.fromkeys(("num_generations", "group_size"), "samples_per_task"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "tasks_per_iteration"),
    "output_dir": "run",
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path"), "model"),
}
"""ttrl's names for settings of other libraries."""
_CUDA_ONLY = ("activation_offloading", "cpu_offload", "optimizer_on_cpu")


def read_settings(path: str) -> dict[str, Any] | str:
    """Return the settings in a YAML file, or why there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except OSError as error:
        return f"an unreadable file: {error.strerror}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return f"not YAML: {' '.join(str(error).split())[:200]}"
    if isinstance(found, dict):
        return found
    return "a file without settings in it"


def _every_layer_matrix() -> list[LoRATarget]:
    return ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


@settings
class TrainingConfig(Config):
    """The settings that both recipes share."""

    _is_part = True

    model: str = required()
    """Folder of the model to start from, in Hugging Face layout."""
    output_dir: str = required()
    """The folder for checkpoint/, state/ and train.jsonl."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": CUDA where there is a GPU, else the CPU."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the computation. Parameters and optimizer state are fp32 either way."""
    checkpoint_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights in checkpoints, not of adapters. "bf16" takes half the disk, and rounds:
    the next iteration starts from the rounded weights, and updates smaller than about 0.2% of a
    weight are lost; not for small learning rates.
    """
    context: int | None = None
    """The server's longest sequence, in tokens (vLLM's max_model_len); RoPE of the type longrope
    depends on it. None: the model's max_position_embeddings, as in vLLM.
    """
    num_threads: int | None = None
    """CPU threads of each process; None leaves it to PyTorch. Repeating a run bit for bit needs the
    same number.
    """
    seed: int = 0
    """The seed of all randomness, with iteration and rank: dropout, the order of rows."""

    # Optimizer

    optimizer: Literal["adamw", "adamw_8bit", "rmsprop", "sgd"] = "adamw"
    """"adamw_8bit" keeps both moments in 8 bits (arXiv 2110.02861, torchao's), a quarter of the
    memory; on CPU it needs a C++ compiler. "rmsprop" divides the gradient by the root of its mean
    square, and "sgd" takes it as it is: W ← W - lr·g. Both are PyTorch's. They need learning rates
    of their own, and without `momentum` half of AdamW's state, and none.
    """
    optimizer_on_cpu: bool = False
    """Keep AdamW's state and take its step on the CPU; gradients are copied there during the
    backward pass (torchao). CUDA only, one process, without clipping. With several processes, use
    cpu_offload.
    """
    optimizer_in_backward: bool = False
    """Step each parameter and free its gradient as soon as the backward pass has it: memory holds
    only one layer's gradients at a time. Excludes clipping, and more than one microbatch per step.
    If a non-finite gradient skips a step, parameters with finite gradients have already been
    stepped.
    """
    lr: float = 1e-5
    """Learning rate of an optimizer step."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after `warmup_steps`: it stays, or falls to zero at `total_steps`."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise of the learning rate to `lr`."""
    total_steps: int | None = None
    """The end of linear and cosine schedules, in optimizer steps of the whole run."""
    beta1: float = 0.9
    """AdamW: decay per step of the mean of gradients; in [0, 1)."""
    beta2: float = 0.95
    """AdamW, RMSprop: decay per step of the mean of squared gradients; in [0, 1)."""
    eps: float = 1e-8
    """AdamW, RMSprop: added to the root of that mean before it divides the step."""
    momentum: float = 0.0
    """SGD, RMSprop: share of the last step's direction in the next one's; in [0, 1)."""
    weight_decay: float = 0.0
    """AdamW: each step also takes lr·weight_decay of each matrix from it; not of norms and biases.
    SGD and RMSprop add weight_decay·W to the gradient.
    """
    max_grad_norm: float | None = 1.0
    """The largest global norm of gradients; larger ones are clipped. None: no clipping."""
    state_format: Literal["auto", "whole", "sharded"] = "auto"
    """How the optimizer's state is stored. "whole": one safetensors file by parameter name, each
    tensor gathered and written by the first rank. "sharded": each rank writes its part and a table
    of its place into a folder visible to all ranks. "auto": sharded if there are several ranks and
    the state is above 8 GB. Either loads with any number of ranks.
    """

    # Memory and speed

    rows_per_microbatch: int = 4
    """Packed rows in one forward and backward pass on each rank. The update is the same for any
    value.
    """
    row_length_multiple: int = 1
    """Rows are trimmed to their real length, rounded up to a multiple of this, on GPUs also of 128.
    Code is compiled for each new length, so `compile` wants few of them (128 or more)."""
    num_output_chunks: int | None = None
    """Chunks of a microbatch's trained positions in the output projection; memory holds only one
    chunk's logits. None: chunks of 128 positions on the CPU and of 1024 elsewhere; larger ones are
    hardly faster.
    """
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""
    checkpoint_every: int = 1
    """With activation_checkpointing: recompute one layer out of this many. 1 saves most memory and
    costs most time.
    """
    checkpoint_keeps: Literal["nothing", "products"] = "nothing"
    """With activation_checkpointing: "products" keeps the results of matrix products and of
    attention, and recomputes only cheap operations: norms, activations, rotations.
    """
    activation_offloading: bool = False
    """Keep activations in the CPU's memory until the backward pass needs them. CUDA only."""
    decoder: Decoder = "auto"
    """The code of the model. "torchtune": ours, for the families it knows. "transformers":
    transformers' own class, unmodified. "auto": ours if it knows the family.
    """
    compile: bool = False
    """torch.compile, layer by layer; needs a C++ compiler on CPU. Pays off if many steps share few
    row lengths. Not with tensor_parallel.
    """

    # Several processes

    tensor_parallel: int = 1
    """Processes per layer: heads, feed-forward columns and vocabulary rows are divided among them,
    and they train on the same rows. The other processes train on other rows, with parameters,
    gradients and state sharded over all (FSDP2).
    """
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state live in the CPU's memory and visit the GPU layer by
    layer. CUDA only.
    """
    reshard_after_forward: bool = True
    """With several processes: free a layer's gathered parameters after its forward pass and gather
    them again for its backward pass. False is faster and needs room for all parameters."""
    collective_timeout: int | None = None
    """With several processes: the most seconds to wait for the others in an exchange. A killed
    process is noticed at once; a machine cut off from the network only through this. Must be longer
    than compilation, and longer than the first process needs to make checkpoint or state durable on
    the shared folder, while all others wait. None: 600, and one for each 25 MB of the model's files
    (7B in bf16: 20 minutes).
    """

    # Adapters: trained while the model itself stays frozen. The formulas:
    # `ttrl.training.policy.lora`.

    lora_rank: int | None = None
    """Rank of the adapters. The base is then frozen, and only adapters have gradients, optimizer
    state and files of their own. None: no adapters; all parameters are trained.
    """
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout of the adapters' inputs, in passes with a gradient only; above 0, the trained model
    differs slightly from the sampling one.
    """
    lora_targets: list[LoRATarget] = field(default_factory=_every_layer_matrix)
    """The matrices with adapters: attention's four, the feed-forward layer's w1 (gate), w2 (down)
    and w3 (up), and "output", the head. Matrices absent from a model are ignored.
    """
    lora_kind: Literal["lora", "dora"] = "lora"
    """"dora" trains the length of each row of a matrix separately from its direction (arXiv
    2402.09353).
    """
    lora_base: str | None = None
    """Folder of the frozen base, if `model` is an earlier iteration's checkpoint; None: the folder
    named by its adapter.
    """
    lora_base_dtype: Literal["auto", "fp32", "bf16", "nf4"] = "auto"
    """Dtype of the frozen base in memory. "auto" keeps each tensor in the 16 bits of its file, or
    else in fp32. Results equal those of "fp32" bit for bit, as 16 bits widen without loss if
    products are computed in fp32. "bf16" rounds files in fp32 to half their size, as a server in
    bf16 does; for `dtype` bf16. "nf4" stores the adapted matrices in 4 bits (QLoRA, arXiv
    2305.14314), and the rest as "auto"; several processes share them by FSDP2 or by
    tensor_parallel, not both.
    """
    lora_merge: bool = True
    """Write the merged model to checkpoints, ready to be served, with the adapter next to it in
    adapter/. False: only the adapter; `python -m ttrl.training.merge`, `ttrl eval` or `ttrl chat`
    merges it later.
    """

    # Monitoring

    max_skipped_steps: int = 2
    """The most optimizer steps in a row to skip for a NaN or infinite loss or gradient; one more
    stops the run.
    """
    measure_peak: bool = True
    """Measure once per process, for a twentieth of a second, the speed of the model's largest
    matrix product; train.jsonl then has each step's share of it.
    """
    profile_steps: int = 0
    """Write a trace of this many first optimizer steps to output_dir/profile/."""
    metric_logger: Any = None
    """Where the numbers of each optimizer step go, besides train.jsonl: an entry as in a run's
    `loggers`, or a list of them, such as "tensorboard" or torchtune's {"_component_":
    "torchtune.training.metric_logging.DiskLogger", "log_dir": "logs"}. A relative log_dir is below
    `output_dir`. In a run, use its `loggers`.
    """

    @property
    def metric_loggers(self) -> list[Any]:
        """The entries of `metric_logger`."""
        if self.metric_logger is None:
            return []
        if isinstance(self.metric_logger, list):
            return self.metric_logger
        return [self.metric_logger]

    @classmethod
    def elsewhere(cls, name: str) -> str | None:
        """Return ttrl's name for another library's setting."""
        other = OTHER_NAMES.get(name)
        if other in cls.names():
            return other
        return None

    def absent(self) -> list[str]:
        """Return a line about the model if it can only be a folder and does not exist."""
        return absent_folder(self.model)

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = super().problems()
        found += self.at_least(
            0, "max_skipped_steps", "profile_steps", "lr", "warmup_steps", "weight_decay", "seed"
        )
        found += self.at_least(
            1,
            "collective_timeout",
            "rows_per_microbatch",
            "num_output_chunks",
            "num_threads",
            "total_steps",
            "row_length_multiple",
            "checkpoint_every",
            "tensor_parallel",
            "context",
        )
        found += self.within("[0, 1)", "beta1", "beta2", "momentum") + self.above_zero("eps")
        if self.momentum and self.optimizer not in ("sgd", "rmsprop"):
            found.append(
                f"momentum is {self.momentum}, which does nothing with optimizer "
                f"{self.optimizer!r}; AdamW's is beta1"
            )
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            found.append(
                f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or null for no "
                "clipping"
            )
        if self.lr_schedule != "constant" and self.total_steps is None:
            found.append(f"lr_schedule {self.lr_schedule!r} needs total_steps")
        if self.lr_schedule == "constant" and self.total_steps is not None:
            found.append(
                f"total_steps is {self.total_steps}, but has no effect with lr_schedule "
                "'constant'; choose another schedule, or leave it out"
            )
        elif self.total_steps is not None and self.warmup_steps >= self.total_steps:
            found.append(
                f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps})"
            )
        found += self._excluded() + self._lora_problems()
        for entry in self.metric_loggers:
            problems = logger_problems(entry)
            found += [problem.replace("loggers:", "metric_logger:", 1) for problem in problems]
        return found + (self._without_cuda() if self.device == "cpu" else [])

    def _excluded(self) -> list[str]:
        """Return the mutually exclusive switches."""
        found = []
        if self.optimizer_in_backward and self.max_grad_norm is not None:
            found.append(
                "optimizer_in_backward steps each parameter before the global norm is known; set "
                "max_grad_norm to null, or "
                "switch it off"
            )
        if self.optimizer_in_backward and self.optimizer_on_cpu:
            found.append(
                "optimizer_in_backward and optimizer_on_cpu exclude each other; switch one off"
            )
        if self.optimizer_on_cpu and self.max_grad_norm is not None:
            found.append(
                "optimizer_on_cpu copies each gradient before the global norm is known, so "
                "clipping would have no effect; set max_grad_norm to null, or switch it off"
            )
        if self.optimizer_on_cpu and self.cpu_offload:
            found.append(
                "cpu_offload already has the optimizer on the CPU; switch optimizer_on_cpu off"
            )
        if self.optimizer_on_cpu and self.optimizer != "adamw":
            found.append(f"optimizer_on_cpu needs optimizer 'adamw', not {self.optimizer!r}")
        if not self.activation_checkpointing:
            for name, plain in (("checkpoint_every", 1), ("checkpoint_keeps", "nothing")):
                if getattr(self, name) != plain:
                    found.append(
                        f"{name} is {getattr(self, name)!r}, but has no effect without "
                        "activation_checkpointing; leave it out"
                    )
        if self.compile and self.checkpoint_keeps != "nothing":
            found.append(
                "checkpoint_keeps cannot see into compiled layers; set it to 'nothing', or "
                "switch compile off"
            )
        if self.compile and self.tensor_parallel > 1:
            found.append(
                "compile with tensor_parallel: PyTorch's compiler loses track of how these "
                "layers' gradients are sharded. Switch compile off, or set tensor_parallel to 1 "
                "(layers sharded by FSDP2 can be compiled)"
            )
        return found

    def _lora_problems(self) -> list[str]:
        if self.lora_rank is None:
            plain = {"lora_targets": _every_layer_matrix()}
            names = [
                name for name in vars(self) if name.startswith("lora_") and name != "lora_rank"
            ]
            given = [
                name
                for name in names
                if getattr(self, name) != plain.get(name, getattr(TrainingConfig, name, None))
            ]
            return [
                f"{name} is {getattr(self, name)!r} without lora_rank; set lora_rank, or leave it "
                "out"
                for name in given
            ]
        found = (
            self.at_least(1, "lora_rank")
            + self.above_zero("lora_alpha")
            + self.within("[0, 1)", "lora_dropout")
        )
        if not self.lora_targets:
            found.append(
                "lora_targets is empty: nothing would be trained; name matrices, or leave it out"
            )
        if len(set(self.lora_targets)) < len(self.lora_targets):
            found.append(f"lora_targets names a matrix twice: {', '.join(self.lora_targets)}")
        if self.lora_dropout > 0 and "output" in self.lora_targets:
            found.append(
                "lora_dropout with an adapter on 'output': that adapter is merged in each pass, "
                "and nothing is dropped; leave one out"
            )
        if self.lora_base_dtype == "nf4":
            for name in ("compile", "cpu_offload"):
                if getattr(self, name):
                    found.append(f"lora_base_dtype 'nf4' does not work with {name}; choose one")
            if "output" in self.lora_targets:
                found.append(
                    "lora_base_dtype 'nf4' with an adapter on 'output': the head is never held in "
                    "4 bits; leave it out"
                )
        return found

    def _without_cuda(self) -> list[str]:
        return [
            f"{name} needs a CUDA device, but this runs on the CPU; leave it out"
            for name in _CUDA_ONLY
            if getattr(self, name)
        ]

    def problems_here(self, device: str, processes: int, shape: Mapping[str, Any]) -> list[str]:
        """Return further mistakes, for a known device, number of processes and config.json of the
        model (`shape`)."""
        found = []
        if device == "cpu" and self.device != "cpu":
            found += self._without_cuda()
        if self.optimizer_on_cpu and processes > 1:
            found.append(
                f"optimizer_on_cpu works in one process, but there are {processes}; use cpu_offload"
            )
        if self.lora_base_dtype == "bf16" and self.dtype != "bf16":
            found.append(
                f"lora_base_dtype is 'bf16' but dtype is {self.dtype!r}; compute in bf16, or leave "
                "lora_base_dtype out"
            )
        if self.lora_base_dtype == "nf4" and 1 < self.tensor_parallel < processes:
            found.append(
                f"lora_base_dtype is 'nf4' with tensor_parallel {self.tensor_parallel} and "
                f"{processes} processes, but weights in 4 bits can only be shared in one way: set "
                f"tensor_parallel to 1 or {processes}"
            )
        parts = self.tensor_parallel
        if parts == 1:
            return found
        if processes % parts:
            found.append(
                f"tensor_parallel is {parts}, but the number of processes is {processes}, not a "
                f"multiple; start {math.lcm(processes, parts)} (torchrun's --nproc_per_node and "
                "--nnodes), or choose a divisor"
            )
        heads = shape.get("num_attention_heads")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            count = shape.get(name) or (heads if name == "num_key_value_heads" else None)
            if isinstance(count, int) and count % parts:
                found.append(
                    f"tensor_parallel is {parts}, but the model's {name} is {count}, not a "
                    "multiple; choose a divisor"
                )
        return found


@settings
class GRPOConfig(ObjectiveConfig, TrainingConfig):
    """One iteration of `tune run ttrl/grpo_recipe`.

    >>> config = TrainConfig(
    ...     run="runs/sums", model="tiny", iterations=2, training=GRPOConfig(lr=1e-5, lora_rank=8)
    ... )
    >>> config.recipe_settings["lora_rank"]
    8
    """

    packed: str = required()
    """The packed.safetensors to train on. If it holds reference log-probabilities, ttrl uses them
    instead of `reference_model`; that setting is then optional, and must be their model. "":
    nothing is trained, and the model in `output_dir`/checkpoint gets its canary.
    """
    state: str | None = None
    """Folder of the optimizer state to continue from; None starts from zero."""
    iteration: int = 1
    """Randomness is derived from (seed, iteration, rank)."""
    updates_per_iteration: int = 1
    """Optimizer steps over the packed rows; each row is used in one of them."""
    lr_rows: int | None = None
    """`lr` is for a step of this many packed rows; a step of R rows uses lr·R/lr_rows. None: `lr`
    as it is.
    """
    temperature: float = 1.0
    """The sampler's temperature: log-probabilities are those of the sampled distribution."""
    drift_tolerance: float | None = None
    """The largest normal distance between sampler and trainer at a token, in nats; above it, the
    token counts as outside. None: by the dtype (`ttrl.training.sampler_drift`).
    """
    drift_rows: Literal["all", "first_update"] = "all"
    """With several optimizer steps: compare sampler and trainer on all rows, with a forward pass of
    its own, or on those of the first step, without one. It does not change the training. An
    off-policy correction, token rewards and dropout need the pass anyway.
    """
    router_replay: bool = False
    """Train mixtures of experts with vLLM's choice of experts for each token, since rounding can
    make the trainer's routers choose others. A token's experts take layers × experts per token
    bytes in each answer (30B-A3B: 384).
    """
    sampler_model: str | None = None
    """Folder of the sampling policy, if it is not `model`. Differences under `model` then come from
    training, so the trainer also compares some rows under the sampler's own weights, swapped in for
    this.
    """
    sampler_version: int | None = None
    """The weights version of `sampler_model` in the pack: only its tokens are compared like this.
    """
    sampler_rows: int = 4
    """The number of rows of the first optimizer step to compare like this: the ones with the most
    such tokens, equally many on each rank; 0: none.
    """
    gradient_noise: bool = True
    """Measure the noise in each step's gradient, from the gradients of its microbatches and ranks
    (`ttrl.instruments.gradient_noise`). Not with tensor_parallel, optimizer_in_backward and
    optimizer_on_cpu.
    """
    entropy_every: int | None = None
    """Before one optimizer step in this many, predict its effect on the entropy of whole answers:
    δH₁ = η⟨∇H, v⟩, measured on a quarter of the step's tasks for the update by the others
    (`ttrl.instruments.online_entropy`). None: never. A measurement costs about half of a step, and
    room for two more gradients. For one process; not with optimizer_in_backward, optimizer_on_cpu
    and lora_dropout.
    """
    follow: str | None = None
    """Folder for the configs of iterations, one after the other (`ttrl.system.request_folder`).
    This config then sets up the process, and names the probable model and state of the first
    iteration, to load them in advance. None: a single iteration, of this config.
    """
    free_memory: bool = False
    """With `follow`: between iterations, model and optimizer wait in the CPU's memory, and the
    GPU's is free for others.
    """
    hand_over: bool = False
    """With `follow`: after an iteration, the new weights are held out in memory, for servers on
    this machine to take them (`ttrl.weights.source`), until the next ones are."""
    save: bool = True
    """With `hand_over`: write checkpoint and state. Otherwise they exist only in memory, see
    `kept`.
    """
    kept: int | None = None
    """With `follow`: the iteration with unwritten weights and state in this process; training
    continues from them. `model` and `state` are then the last written ones. With an empty `packed`,
    they are written to `output_dir`.
    """

    @property
    def sees_gradients(self) -> bool:
        """Whether `gradient_noise` is measured: a step's gradients must all be there, and whole on
        each rank, at its end.
        """
        return self.gradient_noise and not (
            self.tensor_parallel > 1 or self.optimizer_in_backward or self.optimizer_on_cpu
        )

    @property
    def start_of_all_rows(self) -> bool:
        """Whether several optimizer steps begin with a pass over the rows of all of them."""
        return self.drift_rows == "all" or self.off_policy != "none" or self.lora_dropout > 0

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model: with adapters, it is their base."""
        return super().has_reference or self.lora_rank is not None

    @property
    def needs_reference(self) -> bool:
        """Whether anything in the objective compares the policy with a reference model."""
        return self.kl_coefficient > 0 or self.token_rewards == "implicit" or self.watch_kl

    @property
    def needs_estimates(self) -> bool:
        """Whether log-probabilities of the reference model are needed, not only its whole
        distributions.
        """
        return (
            self.kl_coefficient > 0 and self.kl_estimator != "full"
        ) or self.token_rewards == "implicit"

    def problems_here(self, device: str, processes: int, shape: Mapping[str, Any]) -> list[str]:
        """Return further mistakes, as `TrainingConfig.problems_here`."""
        found = super().problems_here(device, processes, shape)
        if self.entropy_every is not None and processes > 1:
            found.append(
                f"entropy_every is for one process, and there are {processes}; leave it out, and "
                "study checkpoints (`ttrl study`)"
            )
        if self.router_replay and not has_experts(shape):
            found.append(
                "router_replay is for mixtures of experts, but the model's config.json has no "
                "experts; leave it out"
            )
        return found

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = super().problems()
        found += self.at_least(
            1, "iteration", "updates_per_iteration", "lr_rows", "entropy_every"
        ) + self.at_least(0, "sampler_rows")
        found += self._entropy_problems()
        found += self.above_zero("temperature", "drift_tolerance") + self._reward_model_problems()
        if (self.sampler_model is None) != (self.sampler_version is None):
            found.append(
                "sampler_model and sampler_version go together: the folder of a policy and its "
                "version in the pack; set both, or none"
            )
        if (
            self.off_policy != "none"
            and self.updates_per_iteration == 1
            and not self._objective_problems()
            and OBJECTIVES[self.objective].from_second_update
        ):
            found.append(
                f"objective {self.objective!r} with off_policy {self.off_policy!r} and "
                "updates_per_iteration 1 has no effect: it acts only after the policy has moved; "
                "set updates_per_iteration to 2 or more"
            )
        return found

    def _reward_model_problems(self) -> list[str]:
        """Return the switches that exclude a reward model."""
        if self.token_rewards != "implicit":
            return []
        why = {
            "optimizer_in_backward": "would step the policy with the reward model's gradients",
            "optimizer_on_cpu": "copies gradients for one optimizer, and the reward model has its "
            "own; use cpu_offload",
            "lora_dropout": "would make the rewards random: they come from the pass that trains "
            "the reward model",
        }
        return [
            f"token_rewards 'implicit' with {name} {getattr(self, name)}, which {reason}"
            for name, reason in why.items()
            if getattr(self, name)
        ]

    def _entropy_problems(self) -> list[str]:
        if self.entropy_every is None:
            return []
        others: dict[str, object] = {
            "tensor_parallel": self.tensor_parallel > 1,
            "optimizer_in_backward": self.optimizer_in_backward,
            "optimizer_on_cpu": self.optimizer_on_cpu,
            "lora_dropout": self.lora_dropout,
        }
        return [
            f"entropy_every with {name}; a step's effect on the entropy is not measured there: "
            "leave entropy_every out, and study checkpoints (`ttrl study`)"
            for name, is_set in others.items()
            if is_set
        ]


@settings
class SFTConfig(TrainingConfig):
    """One run of `tune run ttrl/sft_recipe`."""

    data: str
    """JSON lines, {"messages": [...], "tools": [...]}; "tools" may be missing. All turns of the
    assistant are trained.
    """
    steps: int | None = None
    """Optimizer steps; None if `flops` sets the end."""
    flops: float | None = None
    """Instead of `steps`: end at the conversation nearest to this many FLOPs of all forward and
    backward passes, as counted in train.jsonl (`flops`). The last step may take a part of its
    conversations, at least a quarter. Recomputation does not count.
    """
    state: str | None = None
    """Folder of the optimizer state to continue from, with the next conversations after its steps;
    None starts from zero.
    """
    held_out: str | None = None
    """Further conversations, in a file like `data`, never trained on. The last line of train.jsonl
    has the mean -log π of their trained tokens under the trained weights (`held_out_loss`), and the
    FLOPs for it (`held_out_flops`), which no other figure includes.
    """
    save_state: bool = False
    """Also write output_dir/state, for another run to continue from."""
    batch_size: int = 64
    """Conversations in one optimizer step, over all ranks."""
    seq_len: int = 512
    """Length of a packed row, in tokens."""

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = (
            super().problems()
            + self.at_least(1, "steps", "batch_size", "seq_len")
            + self.above_zero("flops")
        )
        if (self.steps is None) == (self.flops is None):
            found.append(
                f"steps is {self.steps} and flops is {self.flops}, and both set the end; give one "
                "of them"
            )
        return found

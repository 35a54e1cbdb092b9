"""The settings of `tune run ttrl/grpo_recipe` and `tune run ttrl/sft_recipe`: what both share, then what each adds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.configs.base import Config, at_least
from ttrl.configs.lora import LoRAConfig
from ttrl.configs.objective import ObjectiveConfig


@dataclass(kw_only=True)
class WatchConfig(Config):
    """A part of both recipes' configs."""

    max_skipped_steps: int = 2
    """Optimizer steps in a row that may be skipped because their loss or gradient is NaN or infinite; one more stops the run."""
    measure_peak: bool = True
    """Measures once in a process, for a twentieth of a second, how fast the machine computes the model's largest matrix product;
    train.jsonl then says what share of that a step reached."""
    profile_steps: int = 0
    """Writes a trace of the first so many optimizer steps to output_dir/profile/."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        return found + at_least(0, max_skipped_steps=self.max_skipped_steps, profile_steps=self.profile_steps)


@dataclass(kw_only=True)
class ResidentConfig(Config):
    """A part of GRPOConfig."""

    follow: str | None = None
    """Folder in which the configs of iterations appear, one after the other (`ttrl.system.request_folder`); this config then says
    what the process is made of, and which model and state the first of them will probably ask for, to be loaded meanwhile. None:
    one iteration, that of this config."""
    free_memory: bool = False
    """With `follow`: between iterations model and optimizer wait in the CPU's memory, and the GPU's is free for others."""


CUDA_ONLY = ("activation_offloading", "cpu_offload", "optimizer_on_cpu")


@dataclass(kw_only=True)
class TrainingConfig(LoRAConfig):
    """What both recipes share."""

    model: str
    """Folder of the model to start from, in Hugging Face layout."""
    output_dir: str
    """Where checkpoint/, state/ and train.jsonl are written."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the computation. Parameters and optimizer state are fp32 either way."""
    checkpoint_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in checkpoints, not of adapters. "bf16" takes half the disk, and rounds: the next iteration goes on from
    what is written, so that updates smaller than some 0.2% of a weight get lost; not for small learning rates."""
    context: int | None = None
    """The longest sequence that the server takes, in tokens (vLLM's max_model_len), on which RoPE of the type longrope depends;
    None: the model's max_position_embeddings, as in vLLM."""
    num_threads: int | None = None
    """CPU threads of each process; None leaves it to PyTorch. Part of what makes a run repeatable bit for bit."""
    seed: int = 0

    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """"adamw_8bit" keeps both moments in 8 bits (arXiv 2110.02861, torchao's), a quarter of the memory; on CPU it
    needs a C++ compiler. "sgd" has no
    state: W ← W - lr·g, for tests and measurements."""
    optimizer_on_cpu: bool = False
    """AdamW's state and step on the CPU, the gradients copied there during the backward pass (torchao). CUDA only, one process,
    without clipping. With several processes, use cpu_offload."""
    optimizer_in_backward: bool = False
    """Each parameter is stepped and its gradient freed as soon as the backward pass has it, so that only one layer's gradients
    are ever held. Excludes clipping, and more than one microbatch a step. Of a step that is skipped because its gradient is not
    finite, the parameters whose gradients are finite have been stepped all the same."""
    lr: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to `lr`."""
    total_steps: int | None = None
    """Where linear and cosine schedules reach zero, counted over the whole run."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Global norm to which gradients are clipped; None: not at all."""
    state_format: Literal["auto", "whole", "sharded"] = "auto"
    """How the optimizer's state is stored. "whole": one safetensors file by parameter name, each tensor gathered and written by
    the first rank. "sharded": each rank writes its part (torch.distributed.checkpoint), into a folder that all ranks must see.
    "auto": sharded where there are several ranks and the state is above 8 GB. Either loads with any number of ranks."""

    rows_per_microbatch: int = 4
    """Packed rows in one forward and backward pass on each rank. The update is the same for any value."""
    row_length_multiple: int = 1
    """Rows are trimmed to their real length, rounded up to a multiple of this: compiled code is specialised for the lengths that
    it meets, so compile wants few of them (128 or more)."""
    num_output_chunks: int | None = None
    """Chunks in which the trained positions of a microbatch pass through the output projection: only one chunk's logits are ever
    held. None: chunks of 128 positions on the CPU and of 1024 elsewhere, however many that makes; larger ones are hardly
    faster."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping what they computed."""
    checkpoint_every: int = 1
    """With activation_checkpointing: of so many layers, one is recomputed. 1 saves most memory and costs most time."""
    checkpoint_keeps: Literal["nothing", "products"] = "nothing"
    """With activation_checkpointing: "products" keeps the results of matrix products and of attention, and recomputes what is
    cheap: norms, activations, rotations."""
    activation_offloading: bool = False
    """Keep in the CPU's memory what layers computed, until the backward pass asks for it. CUDA only."""
    compile: bool = False
    """torch.compile, layer by layer; needs a C++ compiler on CPU. Pays when many steps share few row lengths. Not with
    tensor_parallel."""

    tensor_parallel: int = 1
    """Processes that share each layer: heads, feed-forward columns and vocabulary rows are dealt out to them, and they train on
    the same rows. Those beside them train on other rows, with parameters, gradients and state sharded over all (FSDP2)."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state live in the CPU's memory and visit the GPU layer by layer. CUDA only."""
    reshard_after_forward: bool = True
    """With several processes: free a layer's gathered parameters after its forward pass and gather them again for its backward
    pass. False is faster and needs room for all parameters."""

    collective_timeout: int = 600
    """With several processes: seconds that one waits for the others, in any one exchange, before it fails. What was killed is
    noticed at once; a machine that was cut off from the network only so. Must be longer than it takes to write the largest weight
    to the shared folder, and to compile."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        found += at_least(1, collective_timeout=self.collective_timeout)
        found += at_least(1, rows_per_microbatch=self.rows_per_microbatch, num_output_chunks=self.num_output_chunks)
        found += at_least(1, num_threads=self.num_threads, total_steps=self.total_steps)
        found += at_least(1, row_length_multiple=self.row_length_multiple, checkpoint_every=self.checkpoint_every)
        found += at_least(1, tensor_parallel=self.tensor_parallel, context=self.context)
        found += at_least(0, lr=self.lr, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay, seed=self.seed)
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            found.append(f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or null for no clipping")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.eps <= 0:
            found.append(f"eps is {self.eps}; it must be above 0")
        if self.lr_schedule != "constant" and self.total_steps is None:
            found.append(f"lr_schedule {self.lr_schedule!r} needs total_steps")
        if self.lr_schedule == "constant" and self.total_steps is not None:
            found.append(f"total_steps is {self.total_steps}, which does nothing with lr_schedule 'constant'; choose another one")
        elif self.total_steps is not None and self.warmup_steps >= self.total_steps:
            found.append(f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps})")
        return found + self._excluded() + (self._without_cuda() if self.device == "cpu" else [])

    def _excluded(self) -> list[str]:
        """Switches that exclude each other."""
        found = []
        if self.optimizer_in_backward and self.max_grad_norm is not None:
            found.append(
                "optimizer_in_backward steps each parameter before the global norm is known; set max_grad_norm to null, or "
                "switch it off"
            )
        if self.optimizer_in_backward and self.optimizer_on_cpu:
            found.append("optimizer_in_backward and optimizer_on_cpu exclude each other; switch one off")
        if self.optimizer_on_cpu and self.max_grad_norm is not None:
            found.append(
                "optimizer_on_cpu copies each gradient before the global norm is known, so that clipping would change nothing; "
                "set max_grad_norm to null, or switch it off"
            )
        if self.optimizer_on_cpu and self.cpu_offload:
            found.append("cpu_offload already has the optimizer on the CPU; switch optimizer_on_cpu off")
        if self.optimizer_on_cpu and self.optimizer != "adamw":
            found.append(f"optimizer_on_cpu is for optimizer 'adamw', not {self.optimizer!r}")
        if not self.activation_checkpointing:
            for name, plain in (("checkpoint_every", 1), ("checkpoint_keeps", "nothing")):
                if getattr(self, name) != plain:
                    found.append(f"{name} is {getattr(self, name)!r}, which does nothing without activation_checkpointing")
        if self.compile and self.checkpoint_keeps != "nothing":
            found.append("checkpoint_keeps cannot see into compiled layers; set it to 'nothing', or switch compile off")
        if self.compile and self.tensor_parallel > 1:
            found.append(
                "compile with tensor_parallel; PyTorch's compiler loses how gradients of such layers are spread over processes: "
                "switch compile off, or set tensor_parallel to 1 (layers that are sharded by FSDP2 can be compiled)"
            )
        return found

    def _without_cuda(self) -> list[str]:
        return [f"{name} needs a CUDA device, and this runs on the CPU" for name in CUDA_ONLY if getattr(self, name)]

    def problems_here(self, device: str, processes: int, shape: Mapping[str, Any]) -> list[str]:
        """What else is wrong once the device ("cpu" or "cuda"), the number of processes and the model's config.json are known."""
        found = self._without_cuda() if device == "cpu" and self.device != "cpu" else []
        if self.optimizer_on_cpu and processes > 1:
            found.append(f"optimizer_on_cpu is for one process, and there are {processes}; use cpu_offload")
        found += self.lora_problems_here(processes)
        parts = self.tensor_parallel
        if parts == 1:
            return found
        if processes % parts:
            found.append(
                f"tensor_parallel is {parts}, which does not divide the number of processes, {processes}; start "
                f"{math.lcm(processes, parts)} (torchrun's --nproc_per_node and --nnodes), or take a divisor"
            )
        heads = shape.get("num_attention_heads")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            count = shape.get(name) or (heads if name == "num_key_value_heads" else None)
            if isinstance(count, int) and count % parts:
                found.append(f"tensor_parallel is {parts}, which does not divide the model's {name}, {count}; take a divisor")
        return found


@dataclass(kw_only=True)
class GRPOConfig(ObjectiveConfig, WatchConfig, ResidentConfig, TrainingConfig):
    """One iteration of `tune run ttrl/grpo_recipe`."""

    packed: str
    """The packed.safetensors to train on. Reference log-probabilities that it holds are used instead of `reference_model`, which
    may be left out then; where it is given, it must be the model that they are of."""
    state: str | None = None
    """Folder of the optimizer state to continue from; None starts afresh."""
    iteration: int = 1
    """Randomness is derived from (seed, iteration, rank)."""
    updates_per_iteration: int = 1
    """Optimizer steps over the packed rows; each row is used in one of them."""
    lr_rows: int | None = None
    """`lr` is for a step of so many packed rows; a step of R rows is taken with lr·R/lr_rows. None: `lr` as it is."""
    temperature: float = 1.0
    """The sampler's: log-probabilities are computed of the distribution that it drew from."""
    drift_tolerance: float | None = None
    """Nats that sampler and trainer may be apart at a token before it is counted as outside; None: by the dtype
    (`ttrl.training.drift`)."""
    drift_rows: Literal["all", "first_update"] = "all"
    """With several optimizer steps: whether sampler and trainer are compared on all rows, which takes a forward pass of its own,
    or on those of the first step, which takes none. What is trained is the same. An off-policy correction, rewards of tokens and
    dropout need that pass anyway."""
    sampler_model: str | None = None
    """The folder of the policy that sampled the rollouts, where that is another one than `model`. Differences under `model` come
    from training then, so some rows are compared under the sampler's own weights as well, which are swapped in for it."""
    sampler_version: int | None = None
    """The weights version of `sampler_model` in the pack: only its tokens are compared so."""
    sampler_rows: int = 4
    """On how many rows of the first optimizer step: those with the most such tokens, as many on each rank; 0: none."""

    @property
    def start_of_all_rows(self) -> bool:
        """Whether several optimizer steps begin with a pass over the rows of all of them."""
        return self.drift_rows == "all" or self.off_policy != "none" or self.lora_dropout > 0

    @property
    def has_reference(self) -> bool:
        """Whether it is known what the policy is compared with: with adapters, it is their base."""
        return super().has_reference or self.lora_rank is not None

    @property
    def needs_reference(self) -> bool:
        """Whether anything in the objective compares the policy with a reference model."""
        return self.kl_coefficient > 0 or self.token_rewards == "implicit"

    @property
    def needs_estimates(self) -> bool:
        """Whether log-probabilities of the reference model are needed, not only its whole distributions."""
        return (self.kl_coefficient > 0 and self.kl_estimator != "full") or self.token_rewards == "implicit"

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        found += at_least(1, iteration=self.iteration, updates_per_iteration=self.updates_per_iteration, lr_rows=self.lr_rows)
        found += at_least(0, sampler_rows=self.sampler_rows)
        if (self.sampler_model is None) != (self.sampler_version is None):
            found.append("sampler_model and sampler_version go together: the folder of a policy and its version in the pack")
        if self.temperature <= 0:
            found.append(f"temperature is {self.temperature}; it must be above 0")
        if self.objective == "kl_cov" and self.off_policy != "none" and self.updates_per_iteration == 1:
            found.append(
                f"objective 'kl_cov' with off_policy {self.off_policy!r} and updates_per_iteration 1; its penalty does nothing, "
                "as it holds the policy to that which the one update starts from: take 2 or more updates"
            )
        if self.drift_tolerance is not None and self.drift_tolerance <= 0:
            found.append(f"drift_tolerance is {self.drift_tolerance}; it must be above 0")
        return found


@dataclass(kw_only=True)
class SFTConfig(WatchConfig, TrainingConfig):
    """One run of `tune run ttrl/sft_recipe`."""

    data: str
    """JSON lines, each {"messages": [...]}, and "tools": [...] where the assistant may call some. All turns of the assistant are
    trained."""
    steps: int
    """Optimizer steps."""
    batch_size: int = 64
    """Conversations in one optimizer step, over all ranks."""
    seq_len: int = 512
    """Length of a packed row, in tokens."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        return super().problems() + at_least(1, steps=self.steps, batch_size=self.batch_size, seq_len=self.seq_len)

"""Estimate the memory of training from config.json, the recipe's settings and the length of its
rows.

The recipe's iteration is split into moments, each with its peak by name:

    loading      parameters, the optimizer's state if there is one, and the pages of their files
    prepass      a forward pass without gradient; a reference model's weights come from a mapped
                 file
    gradient     activations and the head, and gradients growing up to the end of the backward pass
    optimizer    parameters, gradients and moments
    saving       parameters and moments; the merged model, if there are adapters

The estimate is the highest of them. On the CPU it is a process's resident memory beyond that after
its imports (`tools/check_memory.py` measures both), without the pages of mapped files. It counts
the tensors: glibc's heap loses another 10 to 35% between tensors of less than 32 MB (`ttrl plan`
adds 20%), unless MALLOC_MMAP_THRESHOLD_=1048576 is set in the environment, at some 5% of the CPU
time.

On CUDA it is the memory of one device, with an allowance for the context, the allocator's gaps and,
with several GPUs, NCCL's buffers: on an H100 within 5% of the allocated memory, in ten settings of
models of 0.5B and 1.5B (docs/explanation/speed.md).

Letters: D width, V vocabulary, N trained positions of a microbatch, n of a chunk.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.costs.activations import (
    Computation,
    LayerBytes,
    largest_layer_bytes,
    layer_bytes,
)
from ttrl.costs.parameters import (
    DecoderParameters,
    adapted_shapes,
    adapter_parameters,
    decoder_parameters,
    held_dtype,
    trained_parameters,
    undivided_parameters,
)
from ttrl.costs.storage import (
    BYTES,
    PACKED_POSITION_BYTES,
    model_bytes,
    state_bytes,
    state_bytes_each,
)

Device = Literal["cpu", "cuda"]
Parts = dict[str, float]
"""Bytes by content."""

IMPORTS = 0.55e9
"""Resident bytes of a recipe's process after its imports, on the CPU; not in the estimate."""
HEAD_CHUNK = {"cpu": 128, "cuda": 1024}
"""Positions of a chunk of the head, if num_output_chunks is None; as in
`ttrl.training.kernels.logprobs`.
"""
LORA_RANK = 16
"""The rank suggested by `savings`."""
CUDA_CONTEXT = 0.8e9
"""Bytes of a process on a GPU besides its tensors: the context and the kernels' code; on an
H100.
"""
NCCL_BUFFERS = 1.75e9
"""Bytes of a communicator on each of its GPUs: 2,440 MiB with two GPUs less 774 MiB with one
(NVIDIA-NeMo/RL issue 223); others report 1.6 GB (NVIDIA/nccl issue 864) and 1 GiB (vLLM pull
request 51485)."""

_FP32 = 4
_BF16 = 2
# A number, its block's share of a scale, and that one's of its own.
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
_SHARD = 5e9  # of a checkpoint's files
# An optimizer's state up to this size is written by one of several processes, a larger one by all.
_WHOLE_STATE = 8e9
_RUNTIME = 40e6  # kernels and their workspaces, from the first pass on
_OUT_OF_4_BITS = "matrices out of 4 bits"
_WIDENED = "a matrix in fp32"
_OF_ONE_PRODUCT = (_OUT_OF_4_BITS, _WIDENED)
_CUDA_GAPS = 0.06  # of all allocated memory; on an H100 2 to 11%


@dataclass(frozen=True)
class Workload:
    """One rank's training data in an iteration."""

    row_length: int
    """Positions of the longest row."""
    trained_share: float = 1.0
    """Labels, as a share of all positions."""
    rows: int = 1
    """All rows of this rank."""
    microbatches: int = 2
    """In one optimizer step. From the second on, earlier gradients are held throughout."""
    continued: bool = True
    """An optimizer state is loaded: every iteration but a run's first."""
    longest_sample: int | None = None
    """Positions; None: as long as a row. Longer sliding windows change nothing."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part at each moment."""

    moments: Mapping[str, Parts]

    @property
    def moment(self) -> str:
        """Return the moment with the highest sum, mapped files aside."""
        return max(self.moments, key=lambda name: _needed(self.moments[name]))

    @property
    def parts(self) -> Parts:
        """Return the bytes by part at that moment."""
        return self.moments[self.moment]

    @property
    def peak(self) -> float:
        """Return the bytes the process must have."""
        return _needed(self.parts)

    @property
    def resident(self) -> float:
        """Return the most bytes the system will report, mapped files included; it takes back their
        pages when memory is short."""
        return max(sum(parts.values()) for parts in self.moments.values())


def _needed(parts: Parts) -> float:
    return sum(size for name, size in parts.items() if name != "mapped files")


def training_memory(
    model: Mapping[str, Any],
    config: TrainingConfig,
    workload: Workload,
    *,
    device: Device = "cpu",
    ranks: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of one process (on CUDA: of one GPU) during training.

    model: values of config.json. config: of either recipe. ranks: processes with shared parameters
    and different rows, `tensor_parallel` not counted. Raises ModelFolderError if config.json lacks
    a number.
    """
    return _Training(
        decoder_parameters(model), config, workload, device == "cuda", ranks
    ).estimate()


def savings(
    model: Mapping[str, Any],
    config: TrainingConfig,
    workload: Workload,
    *,
    device: Device = "cpu",
    ranks: int = 1,
) -> dict[str, float]:
    """Return the savings of other settings at a process's peak, in bytes, by setting, the largest
    first.

    Arguments as for `training_memory`. Raises ModelFolderError if config.json lacks the model's
    shape.
    """

    def peak(ranks: int = ranks, **changes: Any) -> float:
        return training_memory(
            model, dataclasses.replace(config, **changes), workload, device=device, ranks=ranks
        ).peak

    changes: dict[str, Any] = {"dtype": "bf16", "activation_checkpointing": True}
    positions = config.rows_per_microbatch * workload.row_length
    chunk = head_chunk(config, positions, device)
    # The head's own chunk if that is smaller; else four times as many chunks.
    changes["num_output_chunks"] = (
        None if chunk > HEAD_CHUNK[device] else 4 * -(-positions // int(chunk))
    )
    changes["rows_per_microbatch"] = max(1, config.rows_per_microbatch // 2)
    four_bits = config.lora_base_dtype == "nf4"
    if device == "cuda":
        changes["activation_offloading"] = True
        if not config.optimizer_on_cpu:  # it excludes both
            changes |= {"optimizer": "adamw_8bit"} | ({} if four_bits else {"cpu_offload": True})
    now = peak()
    found = {f"{name}: {value}": now - peak(**{name: value}) for name, value in changes.items()}
    if config.lora_rank is None and config.tensor_parallel == 1:
        found[f"lora_rank: {LORA_RANK} (adapters alone are trained)"] = now - peak(
            lora_rank=LORA_RANK
        )
    # Both exclude it.
    if not (config.optimizer_on_cpu or (four_bits and config.tensor_parallel > 1)):
        found[f"{2 * ranks} processes with different rows"] = now - peak(2 * ranks)
    half = workload.row_length // 2
    if 0 < (workload.longest_sample or 0) <= half:
        smaller = dataclasses.replace(workload, row_length=half, rows=2 * workload.rows)
        found[f"seq_len: {half}"] = (
            now - training_memory(model, config, smaller, device=device, ranks=ranks).peak
        )
    worth = {
        name.replace("True", "true").replace("None", "null"): saved
        for name, saved in found.items()
        if saved > 0.01 * now
    }
    return dict(sorted(worth.items(), key=lambda pair: -pair[1]))


def left_parked(config: TrainingConfig, ranks: int) -> Parts:
    """Return the GPU bytes of a trainer's process without its tensors, by part.

    Processes with different rows have a communicator, and those of `tensor_parallel` another.
    """
    communicators = int(ranks > 1) + int(config.tensor_parallel > 1)
    return {"context": CUDA_CONTEXT, "NCCL": NCCL_BUFFERS * communicators}


def offloaded_bytes(
    model: Mapping[str, Any], config: TrainingConfig, workload: Workload, *, ranks: int = 1
) -> float:
    """Return the bytes of a process's activations in the host's memory (`activation_offloading`).

    PyTorch takes pinned memory in powers of two. Arguments as for `training_memory`, on CUDA.
    """
    if not config.activation_offloading:
        return 0.0
    stay = dataclasses.replace(config, activation_offloading=False)
    decoder = decoder_parameters(model)
    kept, _ = _Training(decoder, stay, workload, True, ranks)._activations()
    layers = decoder.shape.layers
    return layers * 2.0 ** math.ceil(math.log2(kept / layers))


def head_chunk(config: TrainingConfig, positions: float, device: Device) -> float:
    """Return how many of so many trained positions are in the head's largest chunk."""
    if config.num_output_chunks is None:
        return min(positions, HEAD_CHUNK[device])
    return -(-positions // config.num_output_chunks)


class _Training:
    def __init__(
        self,
        decoder: DecoderParameters,
        settings: TrainingConfig,
        workload: Workload,
        cuda: bool,
        ranks: int,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self.workload = workload
        self.cuda = cuda
        if isinstance(settings, GRPOConfig):
            grpo = settings
        else:
            grpo = None
        self.grpo = grpo
        self.updates = grpo.updates_per_iteration if grpo else 1
        self.needs_reference = grpo is not None and grpo.needs_reference
        self.has_reward_model = grpo is not None and grpo.token_rewards == "implicit"
        self.full_divergence = (
            grpo is not None and grpo.kl_coefficient > 0 and grpo.kl_estimator == "full"
        )
        in_loss = grpo is not None and grpo.kl_coefficient > 0 and grpo.kl_in == "loss"
        self.tells_parts = in_loss and (
            self.full_divergence or (grpo is not None and grpo.entropy_coefficient > 0)
        )
        """Whether the head separates the parts of the gradient, from copies of its logits."""
        self.ranks = ranks
        self.sharded = ranks > 1 or settings.cpu_offload
        self.gathers = ranks * settings.tensor_parallel > 1
        """Files hold whole tensors, this process parts of them; it writes the files."""
        self.on_device = not (settings.cpu_offload and cuda)
        """Whether parameters, gradients and moments are on the computing device."""
        self.lora = settings.lora_rank is not None
        bf16 = settings.dtype == "bf16"
        self.how = Computation(bf16, cuda, settings.tensor_parallel, frozen=self.lora)
        held = held_dtype(decoder, settings)
        self.base_size = BYTES[held]
        """Bytes of a frozen number, except for matrices in 4 bits."""
        self.head_size = self.base_size if bf16 else _FP32
        """The same, of the head: fp32 if products are in fp32."""
        mixed = bf16 and cuda and settings.lora_kind != "dora"
        self.gathered_size = self.base_size
        """Bytes of a number gathered by FSDP."""
        self.gathered_head_size = self.head_size
        if mixed:
            self.gathered_size = self.gathered_head_size = _BF16
        self.in_bf16 = held == "bf16" or (self.sharded and mixed)
        """Whether matrices are in bf16 when products ask for them."""
        self.tokens = settings.rows_per_microbatch * workload.row_length
        self.trained = self.tokens * workload.trained_share
        self.head_matrix = decoder.vocabulary_matrix / settings.tensor_parallel
        self.head_gradient = 0.0 if self.lora else self.head_matrix * _FP32
        adapted_head = self.lora and "output" in settings.lora_targets and not decoder.tied
        self.merged_head = self.head_matrix * _FP32 if adapted_head else 0.0
        """Bytes of an output projection with its adapter, made again in each pass; DoRA also holds
        it with unscaled rows.
        """
        shared = settings.tensor_parallel * ranks
        undivided = undivided_parameters(decoder, settings)
        undivided_here = undivided / ranks - undivided / shared  # beyond the share of each
        self.trainable = trained_parameters(decoder, settings) / shared + undivided_here
        """Parameters of this process with a gradient."""
        in_four_bits = self._numbers_in_4_bits()
        base = (decoder.total - in_four_bits) * self.base_size + in_four_bits * _NF4
        base += decoder.vocabulary_matrix * (self.head_size - self.base_size)
        adapters = adapter_parameters(decoder, settings) * _FP32
        self.parameters = (base + adapters) / shared + undivided_here * _FP32
        """Bytes of all parameters in this process."""
        files = BYTES[decoder.stored_dtype] if self.lora else _FP32  # else of the iteration before
        self.mapped = 0.0 if cuda else min(decoder.stored * files / ranks, _SHARD)
        """Bytes of a model's files mapped during reading, one file after the other."""

    def _numbers_in_4_bits(self) -> int:
        """Count the entries of the matrices in 4 bits: those with adapters."""
        if self.settings.lora_base_dtype != "nf4":
            return 0
        return sum(
            before * behind for before, behind in adapted_shapes(self.decoder, self.settings)
        )

    def estimate(self) -> MemoryEstimate:
        """Return the bytes of each moment."""
        moments = {
            "loading": self._loading(),
            "gradient": max(self._gradient(), key=lambda parts: sum(parts.values())),
            "optimizer": self._held(gradients=not self.settings.optimizer_in_backward, moments=True)
            | self._reference_parts(),
            "saving": self._saving(),
        }
        if self.grpo is not None and self.grpo.entropy_every is not None:
            # That of the step waits while one of the entropy joins the present one.
            moments["gradient"] = moments["gradient"] | {
                "gradients of the entropy": 2 * self.trainable * _FP32
            }
        if self.needs_reference or self.updates > 1:
            moments["prepass"] = self._prepass()
        return MemoryEstimate({name: self._finished(parts) for name, parts in moments.items()})

    # Held for long

    def _held(self, *, gradients: bool = False, moments: bool) -> Parts:
        """Return the bytes left on the computing device."""
        if not self.on_device:
            return {}
        parts = {"parameters": self.parameters}
        if self.has_reward_model:
            each = _FP32 + moments * state_bytes_each(self.settings)
            parts["reward model"] = self.trainable * each
        if gradients:
            parts["gradients"] = self.trainable * _FP32
        if moments and not (self.settings.optimizer_on_cpu and self.cuda):
            parts["optimizer state"] = self.trainable * state_bytes_each(self.settings)
        return parts

    def _loading(self) -> Parts:
        continued = self.workload.continued
        state = (
            self.trainable * state_bytes_each(self.settings) if continued and not self.cuda else 0.0
        )
        return self._held(moments=continued) | {"mapped files": max(state, self.mapped)}

    def _saving(self) -> Parts:
        """Add the tensors gathered, merged or rounded for a file; on CUDA this goes tensor by
        tensor.
        """
        held = self._held(moments=True) | self._reference_parts()
        if self.cuda:
            return held
        decoder = self.decoder
        config = self.settings
        made = self.lora or self.gathers or config.checkpoint_dtype == "bf16"
        file = min(model_bytes(decoder, config), _SHARD) if made else 0.0
        state = state_bytes(decoder, config)
        if not self.gathers or state > _WHOLE_STATE:
            state = 0.0
        one = decoder.vocabulary_matrix * _FP32 if self.gathers else 0.0
        return held | {"merged model" if self.lora else "whole tensors": max(file, state) + one}

    def _prepass(self) -> Parts:
        parts = (
            self._held(moments=self.workload.continued)
            | self._working_copies(1)
            | self._reference_parts()
        )
        parts["activations"] = self.tokens * largest_layer_bytes(self.decoder, self.how).kept / 2
        parts["head"] = self._chunk(gradient=False) + self.merged_head
        swapped = self.needs_reference and not self.lora  # adapters are switched off instead
        aside = self.parameters if swapped and not self.cuda else 0.0
        return parts | {"own weights": aside, "mapped files": self.mapped if swapped else 0.0}

    # The gradient

    def _gradient(self) -> list[Parts]:
        """Return the bytes at the head (start of the backward pass), at its first layer, at its
        end, and before all of these, when FSDP gathers."""
        settings = self.settings
        workload = self.workload
        in_backward = settings.optimizer_in_backward
        accumulated = workload.microbatches > 1 and not in_backward
        base = self._held(gradients=accumulated, moments=workload.continued or self.updates > 1)
        base |= self._reference_parts()
        layers = self.decoder.shape.layers
        recomputed = 0
        if settings.activation_checkpointing:
            recomputed = -(-layers // settings.checkpoint_every)
        copies = self._working_copies(max(1, layers - recomputed))
        kept, backward = self._activations()
        kept += self.tokens * self.decoder.shape.width * _FP32  # the last norm's input
        hidden = (self.tokens + 2 * self.trained) * self.decoder.shape.width * _FP32
        head = self._chunk() + self.head_gradient + hidden
        head += (
            self.head_matrix * _BF16
            if self.how.bf16 and (self.merged_head or not self.in_bf16)
            else 0.0
        )
        dora = settings.lora_kind == "dora"
        whole = "gradients of gathered parameters"
        beginning, midway, end = self._whole_gradients()
        at_head = base | {
            name: size for name, size in copies.items() if name not in _OF_ONE_PRODUCT
        }
        at_head |= {"activations": kept, "head": head + (3 if dora else 2) * self.merged_head}
        # The last layer's are made again.
        copies |= self._working_copies(layers - recomputed + int(recomputed > 0))
        if beginning:
            head = self.head_matrix * self.gathered_head_size
        else:
            head = self.head_gradient
        head += (4 if dora else 2) * self.merged_head
        begins = base | copies | {"activations": kept + backward, "head": head, whole: beginning}
        layer = largest_layer_bytes(self.decoder, self.how)
        moments = "optimizer state" in base or in_backward
        held = base | self._held(gradients=not in_backward, moments=moments)
        most = held | self._working_copies(1)
        first = most | {
            "activations": self.tokens * (layer.kept + self._adapter_bytes() + layer.backward),
            "head": self.head_gradient * self.decoder.tied,
            whole: midway,
        }
        # Those of the first layer and of the embeddings come last.
        if not accumulated and "gradients" in most:
            early = self.decoder.layer + (0 if self.lora else self.decoder.vocabulary_matrix)
            first["gradients"] -= self.trainable * min(1.0, early / self.decoder.total) * _FP32
        # Dense gradients of the embeddings come last; with a tied head, its own gradient has waited
        # for them.
        again = int(accumulated or self.decoder.tied or in_backward) + int(
            accumulated and self.decoder.tied
        )
        stream = 2 * self.tokens * self.decoder.shape.width * _FP32
        ends = most | {"activations": stream, "head": again * self.head_gradient}
        if end:  # the parameters are scattered again by then
            ends = held | {whole: end}
        return [at_head, begins, first, ends, base | self._gathering()]

    def _activations(self) -> tuple[float, float]:
        """Return the bytes kept by all layers, and the peak their backward passes add: recomputed
        layers need room after the layers behind them have freed theirs."""
        settings = self.settings
        shape = self.decoder.shape
        row_length = self.workload.row_length
        layers, masks = self._layers()
        kept = 0.0
        worst = 0.0
        for number, layer in enumerate(layers):
            full = layer.kept + self._adapter_bytes()
            if settings.activation_checkpointing and number % settings.checkpoint_every == 0:
                products = layer.products if settings.checkpoint_keeps == "products" else 0.0
                kept += layer.input + products
                worst = max(worst, kept + full - products + layer.backward)
            else:
                kept += full
                worst = max(worst, kept + layer.backward)
        backward = worst - kept
        if settings.activation_offloading and self.cuda:
            kept = 2 * kept / shape.layers  # two layers are under way
        mask = masks * row_length * self.how.bytes
        return self.tokens * (kept + mask), self.tokens * backward

    def _layers(self) -> tuple[list[LayerBytes], int]:
        """Return the bytes kept by each layer, and the number of dense masks."""
        row_length = self.workload.row_length
        longest = self.workload.longest_sample or row_length
        lengths: list[int | None] = []
        masks = set()
        for window in self.decoder.shape.windows:
            if window is None or window >= longest:
                window = None
            dense = not self.cuda and (self.decoder.soft_cap or window is not None)
            if dense:
                masks.add(window)
            lengths.append(row_length if dense else None)
        return layer_bytes(self.decoder, self.how, lengths), len(masks)

    def _adapter_bytes(self) -> float:
        """Return the bytes a layer's adapters keep for each token besides their inputs; with
        dropout, each has a copy of its input. If layers differ, it is the mean."""
        settings = self.settings
        shape = self.decoder.shape
        if settings.lora_rank is None:
            return 0.0
        size = self.how.bytes
        shapes = adapted_shapes(self.decoder, settings)
        dora = settings.lora_kind == "dora"
        numbers = sum(settings.lora_rank + after * dora for _, after in shapes)
        copies = sum(before for before, _ in shapes) * bool(settings.lora_dropout)
        kept = (numbers + copies) * size / shape.layers
        if copies and self.decoder.own is not None:
            # It multiplies with a mask on CUDA, and with numbers on the CPU.
            kept += copies / shape.layers * (1 if self.cuda else size)
            # Those of the inputs themselves are kept no more.
            kept -= (2 * shape.width + shape.feed_forward_width) * size
        return kept

    def _chunk(self, gradient: bool = True) -> float:
        """Return the bytes of a chunk's logits and their products, with or without their
        gradient.
        """
        positions = head_chunk(self.settings, self.trained, "cuda" if self.cuda else "cpu")
        logits = positions * self.decoder.shape.vocabulary
        each = float(self.how.bytes)
        # With those of the reference; on CUDA PyTorch's operations make three copies in fp32.
        if self.full_divergence:
            each += self.how.bytes + (3 * _FP32 if self.cuda else 0)
        # Triton's kernels: logits in fp32, their gradient in bf16.
        elif self.cuda and self.how.bf16:
            each = _FP32 + _BF16 * gradient
        if self.tells_parts:
            each += _FP32 if self.cuda and not self.full_divergence else self.how.bytes
        return logits / self.settings.tensor_parallel * each

    def _reference_parts(self) -> Parts:
        """Return the reference's output projection and hidden states, for KL over the whole
        vocabulary.
        """
        if not self.full_divergence:
            return {}
        workload = self.workload
        positions = self.trained
        if not self.cuda:
            positions += workload.rows * workload.row_length * workload.trained_share
        matrix = self.decoder.vocabulary_matrix * (_FP32 + (_BF16 if self.how.bf16 else 0))
        return {"reference": matrix + positions * self.decoder.shape.width * _FP32}

    def _working_copies(self, layers: float) -> Parts:
        """Return the working copies of the parameters, besides those held: FSDP's gathered ones,
        and bf16 copies of so many layers' matrices, kept by products for their backward pass.
        """
        settings = self.settings
        decoder = self.decoder
        each = decoder.layer / settings.tensor_parallel
        parts: Parts = {}
        in_four_bits = self._numbers_in_4_bits() / decoder.shape.layers / settings.tensor_parallel
        if in_four_bits:
            # indices and numbers
            parts[_OUT_OF_4_BITS] = self._largest_matrix() * (2 * _FP32 + _FP32)
        if self.sharded:
            all_layers = decoder.shape.layers
            layer = (each - in_four_bits) * self.gathered_size + in_four_bits * _NF4
            at_once = all_layers
            if settings.reshard_after_forward:
                at_once = min(2, all_layers)
            parts["gathered parameters"] = self._gathered_root() + at_once * layer
        if self.how.bf16 and not self.in_bf16:
            parts["bf16 copies"] = layers * (each - in_four_bits) * _BF16
        if self.base_size < _FP32 and not self.how.bf16:
            parts[_WIDENED] = self._largest_matrix() * _FP32
        return parts

    def _largest_matrix(self) -> float:
        """Return the entries of the largest matrix here."""
        shapes = self.decoder.matrix_shapes.values()
        return max(before * behind for before, behind in shapes) / self.settings.tensor_parallel

    def _gathered_root(self) -> float:
        """Return FSDP's gathered parameters outside of layers."""
        others = (self.decoder.outside_layers - self.decoder.vocabulary_matrix) * self.gathered_size
        head = self.decoder.vocabulary_matrix * self.gathered_head_size
        return (others + head) / self.settings.tensor_parallel

    def _gathering(self) -> Parts:
        """Return FSDP's bytes while it gathers the first layer: parameters outside of layers are
        there twice, as received and as computed with; a layer as received."""
        if not self.sharded:
            return {}
        layer = self.decoder.layer / self.settings.tensor_parallel * self.gathered_size
        return {"gathered parameters": 2 * self._gathered_root() + layer}

    def _whole_gradients(self) -> tuple[float, float, float]:
        """Return the gradients of gathered parameters before they are scattered: at the start of
        the backward pass (the head's is in "head"), at the first layer, while the head's still
        waits for the embeddings', and at the end.
        """
        if not self.sharded or self.lora:
            return 0.0, 0.0, 0.0
        size = self.gathered_size
        layer = self.decoder.layer / self.settings.tensor_parallel * size
        # If it is tied, it is in "head".
        waiting = 0.0 if self.decoder.tied else self.head_matrix * size
        # At the end the sum over processes is made in fp32, of all gradients, and becomes each
        # one's part while one matrix waits.
        most = max(size, size / 2 + _FP32 / self.ranks)
        return (
            layer,
            layer + waiting,
            self.decoder.outside_layers / self.settings.tensor_parallel * (_FP32 + most),
        )

    def _finished(self, parts: Parts) -> Parts:
        """Add the bytes held besides the recipe's own tensors, and leave out empty parts."""
        if self.cuda:
            gaps = sum(parts.values()) * _CUDA_GAPS
            left = left_parked(self.settings, self.ranks)
            parts = parts | {"allocator's gaps": gaps} | left
        else:
            rows = 2 * self.workload.rows * self.workload.row_length * PACKED_POSITION_BYTES
            parts = parts | {"rows": rows, "runtime": _RUNTIME}
        return {name: size for name, size in parts.items() if size}

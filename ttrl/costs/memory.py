"""The memory of training, estimated from config.json, the recipe's settings and the length of its rows. Needs nothing but Python.

The recipe's iteration is taken apart into moments, each with what it holds at worst, by name:

    loading      parameters, the optimizer's state if there is one, and the pages of the files that they are read from
    prepass      a forward pass without gradient; a reference model's weights come from a mapped file
    gradient     activations and the head, and gradients growing up to the end of the backward pass
    optimizer    parameters, gradients and moments
    saving       parameters and moments; the merged model, where there are adapters

The estimate is the highest of them. On the CPU it is the resident memory of a process beyond what it has after its imports
(`tools/check_memory.py` measures it beside the estimate), without the pages of mapped files. It is what the tensors need: between
tensors of less than 32 MB glibc's heap loses some 10 to 35% more (`ttrl plan` adds 20%), unless MALLOC_MMAP_THRESHOLD_=1048576
stands in the environment, which costs some 5% of the CPU time.

On CUDA it is the memory of one device, with an allowance for the context and for the allocator's gaps; never run on a GPU.

Letters: D width, V vocabulary, N trained positions of a microbatch, n of a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.costs.activations import Computation, layer_bytes
from ttrl.costs.parameters import DecoderParameters, decoder_parameters
from ttrl.costs.training_settings import Settings, Workload

Device = Literal["cpu", "cuda"]
Parts = dict[str, float]
"""Bytes by what they hold."""

IMPORTS = 0.55e9
"""Resident memory of a recipe's process once everything is imported: beside the estimate, on the CPU."""

_FP32, _BF16 = 4, 2
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # a number, its block's share of a scale, and that one's of its own
_ROW_BYTES = 65  # of a position in the packed tensors, all of them together
_SHARD = 5e9  # of a checkpoint's files
_WHOLE_STATE = 8e9  # of an optimizer's state that is written by one of several processes; larger ones each writes a part of
_RUNTIME = 40e6  # kernels and their workspaces, from the first pass on
_CUDA_CONTEXT = 0.7e9
_CUDA_GAPS = 0.06  # of all that is allocated; assumed


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part at each moment."""

    moments: Mapping[str, Parts]

    @property
    def moment(self) -> str:
        """The one with the highest sum, mapped files aside."""
        return max(self.moments, key=lambda name: _needed(self.moments[name]))

    @property
    def parts(self) -> Parts:
        """Of that moment."""
        return self.moments[self.moment]

    @property
    def peak(self) -> float:
        """Bytes that must be there."""
        return _needed(self.parts)

    @property
    def resident(self) -> float:
        """Bytes that the system will report at the worst: with the pages of mapped files, which it takes back where memory is
        short."""
        return max(sum(parts.values()) for parts in self.moments.values())


def _needed(parts: Parts) -> float:
    return sum(size for name, size in parts.items() if name != "mapped files")


def training_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], workload: Workload, *, device: Device = "cpu", ranks: int = 1
) -> MemoryEstimate:
    """One process's (on CUDA: one GPU's) memory while it trains.

    config: values of config.json. settings: those of GRPOConfig, plain. ranks: processes that share the parameters and train on
    different rows, `tensor_parallel` not counted. Raises ModelFolderError where config.json lacks a number.
    """
    return _Training(decoder_parameters(config), Settings.of(settings), workload, device == "cuda", ranks).estimate()


def moment_bytes(optimizer: str) -> float:
    """Of an optimizer's state, for each trained parameter; 8-bit moments have a scale for every 256."""
    return {"adamw": 2.0 * _FP32, "adamw_8bit": 2.0 * (1 + _FP32 / 256), "sgd": 0.0}[optimizer]


def adapter_parameters(decoder: DecoderParameters, settings: Settings) -> int:
    """Of all adapters of low rank; 0 without."""
    rank, shape = settings.lora_rank, decoder.shape
    if rank is None:
        return 0
    of_rows = 1 if settings.lora_kind == "dora" else 0
    own = [ends for name, ends in decoder.matrix_shapes.items() if name in settings.lora_targets]
    total = shape.layers * sum(rank * (before + behind) + of_rows * behind for before, behind in own)
    if "output" in settings.lora_targets and not decoder.tied:
        total += rank * (shape.width + shape.vocabulary) + of_rows * shape.vocabulary
    return total


class _Training:
    def __init__(self, decoder: DecoderParameters, settings: Settings, workload: Workload, cuda: bool, ranks: int) -> None:
        self.decoder, self.settings, self.workload, self.cuda = decoder, settings, workload, cuda
        self.sharded = ranks > 1 or settings.cpu_offload
        self.gathers = ranks * settings.tensor_parallel > 1
        """Files hold whole tensors, of which this process has parts; it is the one that writes."""
        self.on_device = not (settings.cpu_offload and cuda)
        """Parameters, gradients and moments."""
        self.lora = settings.lora_rank is not None
        bf16 = settings.dtype == "bf16"
        self.how = Computation(bf16, cuda, bf16 and cuda and self.sharded, settings.tensor_parallel)
        self.tokens = settings.rows_per_microbatch * workload.row_length
        self.trained = self.tokens * workload.trained_share
        self.head_matrix = decoder.vocabulary_matrix / settings.tensor_parallel
        self.head_gradient = 0.0 if self.lora else self.head_matrix * _FP32
        adapted_head = self.lora and "output" in settings.lora_targets and not decoder.tied
        self.merged_head = self.head_matrix * _FP32 if adapted_head else 0.0
        """An output projection with its adapter, which each pass makes anew; DoRA has it before its rows are scaled as well."""
        shared = settings.tensor_parallel * ranks
        adapters = adapter_parameters(decoder, settings)
        self.trainable = (adapters if self.lora else decoder.total) / shared
        """Parameters with a gradient that this process holds, and …"""
        self.parameters = (decoder.total * _FP32 + adapters * _FP32 - self._saved_by_four_bits()) / shared
        """… bytes of all of them."""
        self.mapped = 0.0 if cuda else min(decoder.stored * _FP32 / ranks, _SHARD)
        """Pages of a model's files while they are read, one file after the other."""

    def _saved_by_four_bits(self) -> float:
        if self.settings.lora_base_dtype != "nf4":
            return 0.0
        return self.decoder.shape.layers * self._adapted_numbers() * (_FP32 - _NF4)

    def _adapted_numbers(self) -> int:
        """Entries of one layer's matrices that have adapters."""
        shapes = self.decoder.matrix_shapes
        return sum(before * behind for name, (before, behind) in shapes.items() if name in self.settings.lora_targets)

    def estimate(self) -> MemoryEstimate:
        moments = {
            "loading": self._loading(),
            "gradient": max(self._gradient(), key=lambda parts: sum(parts.values())),
            "optimizer": self._held(gradients=not self.settings.optimizer_in_backward, moments=True) | self._reference_parts(),
            "saving": self._saving(),
        }
        if self.settings.needs_reference or self.settings.updates_per_iteration > 1:
            moments["prepass"] = self._prepass()
        return MemoryEstimate({name: self._finished(parts) for name, parts in moments.items()})

    # What is held for long

    def _held(self, *, gradients: bool = False, moments: bool) -> Parts:
        """On the device that computes."""
        if not self.on_device:
            return {}
        parts = {"parameters": self.parameters}
        if gradients:
            parts["gradients"] = self.trainable * _FP32
        if moments and not (self.settings.optimizer_on_cpu and self.cuda):
            parts["optimizer state"] = self.trainable * moment_bytes(self.settings.optimizer)
        return parts

    def _loading(self) -> Parts:
        continued = self.workload.continued
        state = self.trainable * 2 * _FP32 if continued and self.settings.optimizer != "sgd" and not self.cuda else 0.0
        return self._held(moments=continued) | {"mapped files": max(state, self.mapped)}

    def _saving(self) -> Parts:
        """Tensors are gathered, merged or rounded for a file; on CUDA, one after the other."""
        held = self._held(moments=True) | self._reference_parts()
        if self.cuda:
            return held
        settings, decoder = self.settings, self.decoder
        rounded = settings.checkpoint_dtype == "bf16"
        made = settings.lora_merge if self.lora else self.gathers or rounded
        file = min(decoder.stored * (_BF16 if rounded else _FP32), _SHARD) if made else 0.0
        trained = adapter_parameters(decoder, settings) if self.lora else decoder.total
        state = trained * 2.0 * _FP32 * (settings.optimizer != "sgd")
        if not self.gathers or state > _WHOLE_STATE:
            state = 0.0
        one = decoder.vocabulary_matrix * _FP32 if self.gathers else 0.0
        return held | {"merged model" if self.lora else "whole tensors": max(file, state) + one}

    def _prepass(self) -> Parts:
        parts = self._held(moments=self.workload.continued) | self._working_copies() | self._reference_parts()
        parts["activations"] = self.tokens * layer_bytes(self.decoder, self.how).kept / 2
        parts["head"] = self._chunk() + self.merged_head
        swapped = self.settings.needs_reference and not self.lora  # adapters are switched off instead
        return parts | {"mapped files": self.mapped if swapped else 0.0}

    # The gradient

    def _gradient(self) -> list[Parts]:
        """At the head; where the backward pass begins; where it comes to the first layer; where it ends."""
        settings, workload = self.settings, self.workload
        in_backward = settings.optimizer_in_backward
        accumulated = workload.microbatches > 1 and not in_backward
        base = self._held(gradients=accumulated, moments=workload.continued or settings.updates_per_iteration > 1)
        base |= self._reference_parts()
        copies = self._working_copies()
        kept, backward = self._activations()
        kept += self.tokens * self.decoder.shape.width * _FP32  # the last norm's input
        hidden = (self.tokens + 2 * self.trained) * self.decoder.shape.width * _FP32
        head = self._chunk() + self.head_gradient + hidden + (self.head_matrix * _BF16 if self.how.bf16 else 0.0)
        dora = settings.lora_kind == "dora"
        whole = "gradients of gathered parameters"
        beginning, midway, end = self._whole_gradients()
        at_head = base | copies | {"activations": kept, "head": head + (3 if dora else 2) * self.merged_head}
        if settings.activation_checkpointing:
            copies.pop("bf16 copies", None)  # made again, layer by layer
        head = self.head_gradient + (4 if dora else 2) * self.merged_head
        begins = base | copies | {"activations": kept + backward, "head": head, whole: beginning}
        layer = layer_bytes(self.decoder, self.how)
        moments = "optimizer state" in base or in_backward
        most = base | self._held(gradients=not in_backward, moments=moments) | copies
        first = most | {
            "activations": self.tokens * (layer.kept + self._adapter_bytes() + layer.backward),
            "head": self.head_gradient * self.decoder.tied,
            whole: midway,
        }
        if not accumulated and "gradients" in most:
            first["gradients"] -= self._first_parameters() * _FP32
        # Dense gradients of the embeddings come last; where the head is tied, its own has waited for them until now.
        again = int(accumulated or self.decoder.tied or in_backward) + int(accumulated and self.decoder.tied)
        stream = 2 * self.tokens * self.decoder.shape.width * _FP32
        ends = most | {"activations": stream, "head": again * self.head_gradient, whole: end}
        return [at_head, begins, first, ends]

    def _first_parameters(self) -> float:
        """Of this process, those whose gradients come last: the first layer's and the embeddings'."""
        early = self.decoder.layer + (0 if self.lora else self.decoder.vocabulary_matrix)
        return self.trainable * min(1.0, early / self.decoder.total)

    def _activations(self) -> tuple[float, float]:
        """What all layers keep, and what their backward passes add to that at the worst moment: layers that are recomputed need
        room when those behind them have given theirs back."""
        settings, shape, row_length = self.settings, self.decoder.shape, self.workload.row_length
        longest = self.workload.longest_sample or row_length
        kept, worst, masks = 0.0, 0.0, set()
        for number, window in enumerate(shape.windows):
            window = None if window is None or window >= longest else window
            dense = not self.cuda and (self.decoder.soft_cap or window is not None)
            if dense:
                masks.add(window)
            layer = layer_bytes(self.decoder, self.how, row_length if dense else None)
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
        mask = len(masks) * row_length * self.how.bytes
        return self.tokens * (kept + mask), self.tokens * backward

    def _adapter_bytes(self) -> float:
        """What a layer's adapters keep for each token, beside their inputs; with dropout, of these a copy for each adapter."""
        if self.settings.lora_rank is None:
            return 0.0
        ends = [ends for name, ends in self.decoder.matrix_shapes.items() if name in self.settings.lora_targets]
        numbers = sum(self.settings.lora_rank + (after if self.settings.lora_kind == "dora" else 0) for _, after in ends)
        kept = float(numbers * self.how.bytes)
        if self.settings.lora_dropout:  # what it multiplies with is a mask on CUDA, and numbers on the CPU
            size, noise = self.how.bytes, 1 if self.cuda else self.how.bytes
            copies = 5 if self.how.bf16 and self.cuda and not self.how.mixed else 2  # of the inputs themselves, kept no more
            kept += sum(before for before, _ in ends) * (size + noise)
            kept -= (copies * self.decoder.shape.width + self.decoder.shape.feed_forward_width) * size
        return kept

    def _chunk(self) -> float:
        """The logits of a chunk, and what is made of them."""
        positions = self.settings.head_chunk(self.trained, "cuda" if self.cuda else "cpu")
        logits = positions * self.decoder.shape.vocabulary
        each = float(self.how.bytes)
        if self.cuda:  # on the CPU, what is made of them stays in the cache
            each += 2 * _FP32
        if self.settings.full_divergence:
            each += self.how.bytes + (_FP32 if self.cuda else 0)
        return logits / self.settings.tensor_parallel * each

    def _reference_parts(self) -> Parts:
        """The reference's output projection and hidden states."""
        if not self.settings.full_divergence:
            return {}
        workload = self.workload
        positions = self.trained
        if not self.cuda:
            positions += workload.rows * workload.row_length * workload.trained_share
        matrix = self.decoder.vocabulary_matrix * (_FP32 + (_BF16 if self.how.bf16 else 0))
        return {"reference": matrix + positions * self.decoder.shape.width * _FP32}

    def _working_copies(self) -> Parts:
        """Parameters as they are computed with, beside those that are held: autocast's copies, or what FSDP has gathered."""
        settings, decoder = self.settings, self.decoder
        layers, each = decoder.shape.layers, decoder.layer / settings.tensor_parallel
        if settings.lora_base_dtype == "nf4":
            largest = max(before * behind for before, behind in decoder.matrix_shapes.values())
            others = layers * (decoder.layer - self._adapted_numbers()) if self.how.bf16 else 0
            return {"matrices out of 4 bits": largest * (_FP32 + self.how.bytes), "bf16 copies": float(others * _BF16)}
        if not self.sharded:
            return {"bf16 copies": layers * each * _BF16} if self.how.bf16 else {}
        root = decoder.outside_layers / settings.tensor_parallel
        size = _BF16 if self.how.mixed else _FP32
        gathered = root + each * (min(2, layers) if settings.reshard_after_forward else layers)
        return {"gathered parameters": gathered * size}

    def _whole_gradients(self) -> tuple[float, float, float]:
        """Of gathered parameters, before they are shared out: where the backward pass begins (the head's is in "head"), at the
        first layer, when the head's still waits for the embeddings', and where it ends."""
        if not self.sharded or self.lora:
            return 0.0, 0.0, 0.0
        size = _BF16 if self.how.mixed else _FP32
        layer = self.decoder.layer / self.settings.tensor_parallel * size
        waiting = 0.0 if self.decoder.tied else self.head_matrix * size  # where it is tied, it is in "head"
        return layer, layer + waiting, self.decoder.outside_layers / self.settings.tensor_parallel * size

    def _finished(self, parts: Parts) -> Parts:
        """With what is beside the recipe's own tensors, and without what is nothing."""
        if self.cuda:
            parts = parts | {"context": _CUDA_CONTEXT, "allocator's gaps": sum(parts.values()) * _CUDA_GAPS}
        else:
            rows = 2 * self.workload.rows * self.workload.row_length * _ROW_BYTES
            parts = parts | {"rows": rows, "runtime": _RUNTIME}
        return {name: size for name, size in parts.items() if size}

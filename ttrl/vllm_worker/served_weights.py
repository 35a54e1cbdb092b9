"""Load new weights in place inside vLLM's workers, and compare a worker's weights with their
source: a checkpoint's files, or a trainer's memory on this machine.

Both methods also make vLLM compute a prompt once for all its samples
(`ttrl.vllm_worker.shared_prompts`).

vLLM mixes `WeightSync` into its worker class (`--worker-extension-cls
ttrl.vllm_worker.WeightSync`). `ttrl.weights` calls its methods over /collective_rpc. Written for
vLLM 0.32's way to reload (`vllm.model_executor.model_loader.reload`).

Loading. vLLM's own `load_weights` narrows each tensor to this worker's share. The memory is one
mapped safetensors file, so a worker reads only its share of it. On a CPU, vLLM computes linear
layers from packed copies, made by `process_weights_after_loading`. Its reload packs loaded layers
again; `ttrl.vllm_worker.reload` does the rest. A GPU copies from the memory as from a file, also
into a server with only its weights awake (sleep of level 2). Has run on CPUs and on one H100.

Comparing. `ttrl_compare_weights` passes the checkpoint's tensors to the model's own `load_weights`,
in a mode for comparing: a copy into a parameter compares and writes nothing. vLLM's own names,
fusing and sharding thus decide the place of each tensor, and every element of every parameter is
compared with the file, bit for bit. If a parameter was discarded after packing, the file's goes
into a buffer, and the packed copy is read out: from the rows of the identity it returns its content
bit for bit. If this costs too much, it is probed with sums with random signs. Experts are packed
once more from the files. Not compared: quantised layers, adapters, experts in another order for a
GPU's kernels, and buffers (tables of rotary embeddings); the canary verifies those. Has run on one
H100, with nothing packed.
"""

import contextlib
import copy
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from ttrl.facts import WeightsComparison
from ttrl.vllm_worker.reload import KeepDirectWrites, pack_again, packs_experts, unpack_experts

logger = logging.getLogger(__name__)
# Checkpoints are in fp32 and servers in bf16: a line for each tensor, twice at each sync, would
# hide important lines.
logging.getLogger("vllm.model_executor.models.utils").addFilter(
    lambda line: "with dtype %s into" not in str(line.msg)
)

EXACT_FLOPS = 2e10
"""Limit for reading out packed copies whole; above it they are probed."""
PROBES = 8
_HASH_THREADS = 4
_MOST_NAMED = 8
_finish: Callable[..., None] = finalize_layerwise_reload
_PLAIN = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class WeightSync:
    """Load and compare weights; `self` is vLLM's worker."""

    def ttrl_load_weights(self, folder: str | None = None, memory: str | None = None) -> None:
        """Replace the current weights by the checkpoint in `folder`, or in `memory`. Raises vLLM's
        errors; layers not reached keep their weights.
        """
        worker: Any = self
        _share_prompts(worker)
        model = worker.model_runner.get_model()
        unpack_experts(model)
        try:
            with KeepDirectWrites(model):
                worker.reload_weights(weights_iterator=self.ttrl_read_weights(folder, memory))
        except BaseException:
            with set_current_vllm_config(worker.vllm_config):
                _finish(model, worker.model_config)
            raise
        with set_current_vllm_config(worker.vllm_config):
            pack_again(model)

    def ttrl_read_weights(
        self, folder: str | None, memory: str | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to load, under Hugging Face names."""
        return read_weights(self, folder, memory)

    def ttrl_compare_weights(
        self,
        folder: str | None = None,
        memory: str | None = None,
        parts: list[tuple[str, list[int], list[int]]] | None = None,
    ) -> Mapping[str, Any]:
        """Compare this worker's weights with the files of `folder`, or with `memory`.

        parts: the tensor parts with digests of the trainer, as (name, starts, lengths); each worker
            reads its share of them. None: each of the tensors.

        Returns the JSON of WeightsComparison.
        """
        worker: Any = self
        _share_prompts(worker)
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            try:
                weights = read_weights(worker, folder, memory)
                shares = None if parts is None else _share(worker, parts)
                return _compare(worker, weights, shares).to_json()
            # Another model or vLLM may work differently: there is still the canary.
            except Exception as error:
                logger.exception("weights cannot be compared")
                why = f"{type(error).__name__}: {error}"
                return WeightsComparison(failed=why).to_json()


def _share_prompts(worker: Any) -> None:
    if worker.model_runner.device.type == "cpu":
        try:
            from ttrl.vllm_worker.shared_prompts import share_prompts
        except ImportError as error:  # another version of vLLM
            logger.warning("prompts of several samples are computed for each: %s", error)
        else:
            share_prompts(worker)


def read_weights(
    worker: Any, folder: str | None, memory: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's tensors under Hugging Face names, from its files or from memory."""
    if memory is not None:
        with safe_open(memory, "pt") as mapped:
            for name in mapped.keys():  # noqa: SIM118 - not a dictionary
                yield name, mapped.get_tensor(name)
        return
    config = copy.copy(worker.vllm_config.model_config)
    config.model = folder
    config.model_weights = ""
    config.revision = None
    loader: Any = get_model_loader(worker.vllm_config.load_config)
    yield from loader.get_all_weights(config, worker.model_runner.get_model())


_Parts = dict[str, list[tuple[str, tuple[slice, ...]]]]
"""Name of a tensor → its hashed parts, each under a name of its own."""


def _share(worker: Any, parts: list[tuple[str, list[int], list[int]]]) -> _Parts:
    """Return this worker's parts to hash; together the workers hash each part once."""
    mine: _Parts = {}
    for number, (name, starts, lengths) in enumerate(parts):
        if number % worker.parallel_config.world_size == worker.rank:
            slices = tuple(
                slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
            )
            mine.setdefault(name, []).append((f"{name} {number}", slices))
    return mine


def _compare(
    worker: Any, weights: Iterable[tuple[str, Tensor]], parts: _Parts | None
) -> WeightsComparison:
    model = worker.model_runner.get_model()
    held = _Held(model)
    digests: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(_HASH_THREADS) as pool:

        def read(source: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in source:
                for label, part in [(name, ())] if parts is None else parts.get(name, []):
                    digests[label] = pool.submit(_digest, tensor[part])
                yield name, tensor

        with held.in_place_of_what_is_packed(), _CompareInsteadOfCopying(held):
            model.load_weights(read(weights))
        held.compare_loaded()
        held.compare_experts()
        held.compare_packed()
        tensors = {name: digest.result() for name, digest in digests.items()}
    return WeightsComparison(
        problems=held.problems(),
        tensors=tensors,
        compared=held.compared,
        unchecked=held.unchecked + held.not_reached,
        exact=held.exact,
    )


def _digest(tensor: Tensor) -> str:
    """Compute a tensor's digest, as `ttrl.training.checkpoints` does when it writes the tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()


class _Held:
    """Compare a model's parameters, and collect the findings."""

    def __init__(self, model: nn.Module) -> None:
        self.compared = self.unchecked = 0
        self.exact = True
        self._live: dict[int, str] = {}  # address of the storage → name of the parameter
        # Elements not yet compared with a tensor of the files.
        self._left: dict[str, int] = {}
        self._wrong: dict[str, int] = {}  # differing elements
        self._packed: dict[str, nn.Module] = {}
        self._gone: set[str] = set()  # parameters left only as a packed copy
        self._stand_ins: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._expected: dict[str, Tensor] = {}
        # Layer name → layer and its experts.
        self._experts: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {}
        # Name → parameter, and its value by the files.
        self._loaded: dict[str, tuple[Tensor, Tensor]] = {}
        # A tied parameter under its first name only.
        names = {name for name, _ in model.named_parameters()}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._sort(f"{prefix}.{key}".lstrip("."), module, key, parameter, names)

    def _sort(
        self, name: str, module: nn.Module, key: str, parameter: nn.Parameter, names: set[str]
    ) -> None:
        original = get_layerwise_info(module).restore_metadata[0].get(key, parameter)
        if not (_is_plain(module) or packs_experts(module)) or parameter.is_meta:
            self.unchecked += original.numel()
            # On the meta device: copies do nothing.
            self._stand_ins.append((module, key, _restored(original, module)))
            return
        if _is_transformed(original):
            self._loaded[name] = parameter, self._stand_in(module, key, original)
            return
        if packs_experts(module) and key.startswith(("w13_", "w2_")):
            experts = self._experts.setdefault(name.removesuffix(f".{key}"), (module, {}))[1]
            experts[key] = self._stand_in(module, key, original)
            return
        is_packed = key == "weight" and hasattr(module, "cpu_linear")
        if is_packed and not parameter.numel():
            parameter = self._stand_in(module, key, original)
            self._gone.add(name)
        elif name in names:
            self._live[parameter.untyped_storage().data_ptr()] = name
            self._left[name] = parameter.numel()
        if is_packed:
            self._packed[name], self._expected[name] = module, parameter

    def _stand_in(self, module: nn.Module, key: str, original: Tensor) -> nn.Parameter:
        """Make a parameter to load in place of the layer's own."""
        made: Any = materialize_meta_tensor(_restored(original, module))
        made.fill_(math.nan)  # marks elements not filled by any tensor of the files
        self._stand_ins.append((module, key, made))
        parameter: nn.Parameter = made
        return parameter

    @contextlib.contextmanager
    def in_place_of_what_is_packed(self) -> Iterator[None]:
        """Give layers a loadable parameter if theirs is gone or differs from the checkpoint's
        form.
        """
        own = [(module, key, module._parameters[key]) for module, key, _ in self._stand_ins]
        for module, key, stand_in in self._stand_ins:
            module._parameters[key] = stand_in
        try:
            yield
        finally:
            for module, key, parameter in own:
                module._parameters[key] = parameter

    def owner(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor's parameter."""
        if tensor.is_meta:
            return None
        return self._live.get(tensor.untyped_storage().data_ptr())

    def take(self, name: str, held: Tensor, file: Tensor) -> None:
        self.compared += held.numel()
        self._left[name] -= held.numel()
        wanted = file.to(device=held.device, dtype=held.dtype).expand_as(held)
        if not torch.equal(held, wanted):
            self._wrong[name] = self._wrong.get(name, 0) + int((held != wanted).sum())

    def compare_loaded(self) -> None:
        """Compare parameters computed by vLLM from the files' tensors, such as Mamba's A =
        -exp(A_log).
        """
        for name, (parameter, loaded) in self._loaded.items():
            self._left[name] = parameter.numel()
            self.take(name, parameter, loaded)

    def compare_experts(self) -> None:
        """Compare packed experts with the result of packing the files' tensors."""
        for prefix, (module, loaded) in self._experts.items():
            packed: Any = copy.copy(module)
            parameters = {
                key: nn.Parameter(tensor, requires_grad=False) for key, tensor in loaded.items()
            }
            packed.__dict__["_parameters"] = {**module._parameters, **parameters}
            method: Any = copy.copy(module.quant_method)
            method.moe_kernel = None  # a method with a kernel does not pack
            method.process_weights_after_loading(packed)
            for key in loaded:
                held = module._parameters[key]
                assert held is not None
                name = f"{prefix}.{key}"
                self._left[name] = held.numel()
                self.take(name, held, packed._parameters[key])

    def compare_packed(self) -> None:
        """Compare the outputs of packed copies with those of the files' tensors, or of the compared
        parameters.
        """
        total = sum(2 * weight.numel() * weight.shape[1] for weight in self._expected.values())
        self.exact = total <= EXACT_FLOPS
        for name, module in self._packed.items():
            weight = self._expected[name]
            packed: Any = module.cpu_linear
            wrong = _differences(packed, weight, self.exact)
            if name in self._gone:  # else the parameter itself was compared, too
                self.compared += weight.numel()
            if wrong:
                if name in self._gone:
                    label = name
                else:
                    label = f"{name} (its packed copy)"
                self._wrong[label] = self._wrong.get(label, 0) + wrong

    @property
    def not_reached(self) -> int:
        """Elements without a tensor in the files, such as the bias of Phi's head; the canary
        verifies them.
        """
        return sum(max(0, left) for left in self._left.values())

    def problems(self) -> list[str]:
        """Return the differences in words, one line each."""
        if self.exact:
            what = "elements"
        else:
            what = "elements, or rows of a packed copy,"
        found = [
            f"{name}: {count} {what} are not those of the files"
            for name, count in self._wrong.items()
        ]
        if len(found) <= _MOST_NAMED:
            return found
        return [*found[:_MOST_NAMED], f"and {len(found) - _MOST_NAMED} more"]


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a layer's parameters are those of a checkpoint, laid out alike."""
    method: Any = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend.name == "TRITON"
    return isinstance(method, _PLAIN)


def _is_transformed(parameter: Tensor) -> bool:
    """Tell whether vLLM transforms a parameter after loading."""
    loader = _get_original_loader(parameter)
    return "composed_weight_loader" in str(getattr(loader, "__qualname__", ""))


def _restored(original: Tensor, module: nn.Module) -> nn.Parameter:
    """Return a parameter on the meta device, with its loader, as vLLM first made it."""
    found: Any = restore_layer_refs(to_meta_tensor(original), module)
    # Not the wrapper of an earlier reload.
    found.weight_loader = _get_original_loader(found)
    parameter: nn.Parameter = found
    return parameter


class _CompareInsteadOfCopying(TorchDispatchMode):
    """Compare a weight loader's copy with the parameter instead of writing it."""

    def __init__(self, held: _Held) -> None:
        prepare: Callable[[], None] = super().__init__
        prepare()
        self._held = held

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        writes: dict[Any, int | None] = {
            torch.ops.aten.copy_.default: 1,
            torch.ops.aten.fill_.Scalar: 1,
            torch.ops.aten.zero_.default: None,
        }
        name = self._held.owner(args[0]) if func in writes else None
        if name is not None:
            place = writes[func]
            value = 0 if place is None else args[place]
            self._held.take(
                name,
                args[0],
                value if isinstance(value, Tensor) else torch.tensor(value, dtype=args[0].dtype),
            )
            return args[0]
        return func(*args, **(kwargs or {}))


def _differences(packed: Callable[..., Tensor], weight: Tensor, exact: bool) -> int:
    """Count the elements [rows, columns] of a packed copy differing from `weight`'s, or, if it is
    probed, the rows with such.
    """
    columns = weight.shape[1]
    if exact:
        wrong = 0
        for part in torch.arange(columns).split(256):
            one_hot = torch.zeros(len(part), columns, dtype=weight.dtype)
            one_hot[torch.arange(len(part)), part] = 1
            wrong += int((packed(one_hot, weight, None) != weight[:, part].T).sum())
        return wrong
    # Sums with random signs: an element off by d is off by d in each. Products are exact; sums are
    # rounded, in float32, by about sqrt(columns)·2⁻²⁴ of the sum of magnitudes, and then to the
    # weights' type.
    signs = (
        torch.randint(2, (PROBES, columns), generator=torch.Generator().manual_seed(0))
        .mul(2)
        .sub(1)
    )
    doubled = weight.double()  # once: it is twice the size of the weights
    wanted = signs.double() @ doubled.T
    rounding = (
        4 * math.sqrt(columns) * 2**-24 * doubled.norm(1, dim=1)
        + torch.finfo(weight.dtype).eps * wanted.abs()
    )
    off = (packed(signs.to(weight.dtype), weight, None).double() - wanted).abs()
    return int((~(off <= rounding)).any(0).sum())

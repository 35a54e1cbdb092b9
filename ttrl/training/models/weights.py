"""Parameters from safetensors and back, under either naming: theirs (Hugging Face) and ours
(torchtune's).

Some families store matrices fused along their rows (Phi-3: q, k and v; gate and up), or transposed
and fused along their columns (GPT-2); ours are apart.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from ttrl.errors import ModelFolderError
from ttrl.families.own import OwnDecoder
from ttrl.families.table import COMPOSITES, OWN_DECODERS, Composite
from ttrl.system.files import again, read_object
from ttrl.system.weight_files import check_tied_head
from ttrl.training.models.architecture import (
    Architecture,
    Chosen,
    architecture,
    read_config,
    uses_transformers,
)
from ttrl.training.models.layouts import Layout, layout_of_class, prefixes_among

_LAYER = re.compile(r"\.(\d+)\.")
# In old files; the last two hold GPT-2's causal mask.
_TABLES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FILE_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """A tensor of a checkpoint: its name there, and its parameters of ours, concatenated along its
    rows; or, if it is transposed, its columns."""

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False
    layout: Layout | None = None
    """The part of the parameter, for a class of transformers."""

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor, from the parameters."""
        if self.layout is not None:
            return self.layout.views(self.parameters[0], parts[0])[self.name]
        if len(parts) > 1:
            whole = torch.cat(tuple(parts))
        else:
            whole = parts[0]
        if self.transposed:
            return whole.T
        return whole


def _template(name: str) -> tuple[str, str | None]:
    """Split "layers.7.x" into ("layers.{}.x", "7")."""
    layer = _LAYER.search(name)
    if layer:
        return (name.replace(layer[0], ".{}.", 1), layer[1])
    return (name, None)


def _is_transposed(theirs: str, family: OwnDecoder) -> bool:
    return theirs.endswith(".weight") and theirs.split(".")[-2] in family.transposed


def stored_as(parameters: Mapping[str, Any], config: PretrainedConfig) -> list[Stored]:
    """Return how a checkpoint stores parameters of these names; a tied head once more by itself, if
    the family stores it so.
    """
    if uses_transformers(config):
        layout, shapes = layout_of_class(config)
        return [
            Stored(view, (name,), layout=layout)
            for name in parameters
            for view in layout.views(name, shapes[name])
        ]
    table = {}
    family = OWN_DECODERS[config.model_type]
    for theirs, ours in family.names.items():
        parts = (ours,) if isinstance(ours, str) else ours
        table[parts[0]] = (theirs, parts)
    later = {part for _, parts in table.values() for part in parts[1:]}
    found = []
    for name in parameters:
        template, layer = _template(name)
        if template in later:
            continue
        assert template in table, f"no Hugging Face name for {name}"
        theirs, parts = table[template]
        transposed = _is_transposed(theirs, family)
        found.append(
            Stored(theirs.format(layer), tuple(part.format(layer) for part in parts), transposed)
        )
    if config.tie_word_embeddings and family.tied_head_in_files:
        found.append(Stored("lm_head.weight", ("tok_embeddings.weight",)))
    return found


def to_hugging_face_names(
    weights: Mapping[str, Tensor], config: PretrainedConfig
) -> dict[str, Tensor]:
    """Undo `iter_weights`; a tied head is a copy of its own. Gradients or moments are renamed just
    as well.
    """
    renamed = {}
    for stored in stored_as(weights, config):
        renamed[stored.name] = stored.joined([weights[part] for part in stored.parameters])
    if config.tie_word_embeddings and "lm_head.weight" in renamed:
        renamed["lm_head.weight"] = renamed["lm_head.weight"].clone()
    return renamed


def _rows(parameter: str, shape: Architecture) -> int:
    """Return the rows of a parameter fused with others in storage."""
    sizes = {
        "q_proj": shape.num_attention_heads * shape.head_dim,
        "k_proj": shape.num_key_value_heads * shape.head_dim,
        "v_proj": shape.num_key_value_heads * shape.head_dim,
    }
    return sizes.get(parameter.split(".")[-2], shape.intermediate_size)


def files_of(folder: Path) -> list[str]:
    """Return the safetensors files of a model folder, one or a sharded set. Raises
    ModelFolderError; pickles are refused.
    """
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        try:
            files = sorted(set(read_object(index)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelFolderError(
                f"{index} is damaged ({type(error).__name__}: {error}); copy or download it again"
            ) from error
    for file in files:
        if not (folder / file).is_file():
            raise ModelFolderError(
                f"{folder} has no {file}; save the model with save_pretrained (safetensors, not "
                "pickles)"
            )
    return files


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise ModelFolderError for a file that cannot be read inside the block."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{file} cannot be read ({error}); copy or download it again"
        ) from error


def _opened(file: Path) -> Any:
    return again(partial(safe_open, file, framework="pt"))


def iter_stored(folder: str | Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (file, name, tensor) of all stored tensors in a folder, one at a time."""
    folder = Path(folder)
    for file in files_of(folder):
        with _reading(folder / file), _opened(folder / file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                yield file, name, tensors.get_tensor(name)


def composite_of(folder: str | Path) -> Composite | None:
    """Return a model folder's non-text parts; None if it has none."""
    return COMPOSITES.get(read_object(Path(folder) / "config.json")["model_type"])


def layout_of(stored: str, composite: Composite) -> tuple[Mapping[str, str], str] | None:
    """Return a stored name's layout and its plain name; None without a layout."""
    for layout in composite.layouts:
        for plain, prefix in layout.items():
            if stored.startswith(prefix):
                return layout, plain + stored.removeprefix(prefix)
    return None


def check_head(folder: str | Path) -> None:
    """Check the output head in the files of a model with tied embeddings. Raises
    ModelFolderError."""
    files = [Path(folder, file) for file in files_of(Path(folder))]
    try:
        again(partial(check_tied_head, files))
    except OSError as error:
        raise ModelFolderError(f"{folder} cannot be read ({error})") from error


def iter_weights(folder: str | Path, decoder: Chosen = "auto") -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) of every parameter of a model folder, in the dtype of its files, on
    the CPU. Files are mapped into memory and read tensor by tensor: the host never holds the whole
    model. Raises ModelFolderError.
    """
    config = read_config(folder, decoder)
    if config.tie_word_embeddings:
        check_head(folder)
    if uses_transformers(config):
        yield from _iter_parts(Path(folder), config)
        return
    shape = architecture(config)
    family = OWN_DECODERS[config.model_type]
    composite = composite_of(folder)
    for file, stored, tensor in iter_stored(folder):
        theirs = stored
        if composite is not None:
            if stored.startswith(composite.frozen):
                continue
            found = layout_of(stored, composite)
            if found is not None:
                _, theirs = found
        template, layer = _template(theirs)
        if _is_left_out(theirs, config):
            continue
        if template not in family.names:
            template = family.prefix + template
        if template not in family.names:
            raise ModelFolderError(f"{folder}/{file}: ttrl's decoder has no parameter {stored!r}")
        _check_dtype(tensor, f"{folder}/{file}: {stored}")
        if _is_transposed(template, family):
            tensor = tensor.T
        ours = family.names[template]
        parts = [part.format(layer) for part in ((ours,) if isinstance(ours, str) else ours)]
        if len(parts) == 1:
            yield parts[0], tensor
            continue
        rows = [_rows(part, shape) for part in parts]
        if tensor.shape[0] != sum(rows):
            raise ModelFolderError(
                f"{folder}/{file}: {stored} has {tensor.shape[0]} rows, but config.json says "
                f"{sum(rows)}"
            )
        yield from zip(parts, tensor.split(rows), strict=True)


def _iter_parts(folder: Path, config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a transformers class, assembled from their stored tensors."""
    layout, shapes = layout_of_class(config)
    places = names_in(folder, config)
    opened: dict[Path, Any] = {}
    with contextlib.ExitStack() as files:
        for name, shape in shapes.items():
            views = layout.views(name, shape)
            if not views.keys() <= places.keys():
                continue  # `check_weights` names it
            parts = {}
            for view, wanted in views.items():
                file, stored = places[view]
                with _reading(file):
                    if file not in opened:
                        opened[file] = files.enter_context(_opened(file))
                    parts[view] = opened[file].get_tensor(stored)
                what = f"{file}: {stored}"
                _check_dtype(parts[view], what)
                if parts[view].shape != wanted.shape:
                    raise ModelFolderError(
                        f"{what} is {tuple(parts[view].shape)}, but config.json says "
                        f"{tuple(wanted.shape)}"
                    )
            yield name, _put_together(layout, name, shape, parts)


def _check_dtype(tensor: Tensor, what: str) -> None:
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ModelFolderError(
            f"{what} is {tensor.dtype}; ttrl trains from float weights of 16 bits or more"
        )


def _put_together(layout: Layout, name: str, shape: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    first, *others = parts.values()
    if not others and first.shape == shape.shape:
        return first
    whole = torch.empty(shape.shape, dtype=first.dtype)
    for view, place in layout.views(name, whole).items():
        place.copy_(parts[view])
    return whole


def names_in(folder: Path, config: PretrainedConfig) -> dict[str, tuple[Path, str]]:
    """Return the place of each tensor of a transformers class in a folder: the layout's name →
    (file, name there). Raises ModelFolderError for tensors without a place in it."""
    layout, shapes = layout_of_class(config)
    own = {view for name, shape in shapes.items() for view in layout.views(name, shape)}
    stored = stored_names(folder)
    prefixes = prefixes_among(stored, own)
    places = {}
    for view in own:
        name = prefixes.stored(view)
        if name in stored:
            places[view] = (folder / stored[name], name)
    others = stored.keys() - {name for _, name in places.values()}
    if text_only(folder):
        strange = sorted(name for name in others if not _may_be_beside(name, layout, config))
        if strange:
            raise ModelFolderError(f"{folder}: its model class has no parameter {strange[0]!r}")
    return places


def text_only(folder: Path) -> bool:
    """Tell whether a model folder holds a text-only model, by its config.json."""
    return not isinstance(read_object(folder / "config.json").get("text_config"), dict)


def _is_left_out(name: str, config: PretrainedConfig) -> bool:
    return name.endswith(_TABLES) or (config.tie_word_embeddings and name == "lm_head.weight")


def _may_be_beside(name: str, layout: Layout, config: PretrainedConfig) -> bool:
    if _is_left_out(name, config):
        return True
    return any(re.search(pattern, name) for pattern in layout.ignored)


def stored_names(folder: Path) -> dict[str, str]:
    """Return the file of each stored tensor, by its name."""
    found: dict[str, str] = {}
    for file in files_of(folder):
        with _reading(folder / file), _opened(folder / file) as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Any) -> None:
    """Raise ModelFolderError if weights and parameters have other names or shapes (for sharded
    ones, the whole shape).
    """
    missing = sorted(own.keys() - weights.keys())
    surplus = sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if missing or surplus or shapes:
        raise ModelFolderError(
            f"{folder}: the weights do not match its config.json: missing {missing[:3] or 'none'}, "
            f"unexpected {surplus[:3] or 'none'}, other shapes {sorted(shapes)[:3] or 'none'}"
        )


def bytes_of(tensor: Tensor) -> memoryview | bytes:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        return flat.view(torch.uint8).numpy().data
    return b""


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file of tensors on the CPU; return its SHA-256, computed from memory
    meanwhile. Raises OSError.

    The bytes equal those of safetensors 0.8 for tensors of one type, without its writer: it took 4
    s, this takes 0.6 (650 MB on a busy machine; 1.8 and 0.2 s of CPU). Tensors may share memory.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # each is aligned
    header: dict[str, Mapping[str, object]] = {}
    if metadata is not None:
        header["__metadata__"] = metadata
    end = 0
    for name in names:
        begin = end
        end = end + tensors[name].nbytes
        described = {"dtype": FILE_DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = described | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    hashed = hashlib.sha256()
    with open(path, "wb") as file, ThreadPoolExecutor(1) as hashing:
        waiting = []
        for part in (
            len(text).to_bytes(8, "little"),
            text,
            *(bytes_of(tensors[name]) for name in names),
        ):
            waiting.append(hashing.submit(hashed.update, part))
            file.write(part)
        for one in waiting:
            one.result()
    return hashed.hexdigest()

"""Write a checkpoint as a GGUF file, for llama.cpp, Ollama and their relatives.

The numbers are the checkpoint's, tensor by tensor: files are mapped into memory, so a large model
needs no memory of its size. Vectors stay in float32 whatever the dtype: llama.cpp computes with
them so, and they are small.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType
from torch import Tensor
from transformers import PretrainedConfig

from ttrl.errors import ModelFolderError
from ttrl.exports.checkpoint import Chosen
from ttrl.exports.gguf_layout import Layout, layout_of, ropes
from ttrl.exports.gguf_tokenizer import Vocabulary, vocabulary
from ttrl.exports.modelfile import modelfile
from ttrl.server.model_folder import merge_adapter, stored_dtype
from ttrl.system.files import atomic_file, write_text
from ttrl.training.models.architecture import read_config
from ttrl.training.models.rope import frequencies
from ttrl.training.models.weights import iter_weights

DTYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""By name: the type of the matrices, and of the file."""
_BY_STORED = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_PARTS = tuple(f"attn.{part}_proj" for part in "qkv")


def export_gguf(chosen: Chosen, output: Path, dtype: str | None = None) -> list[Path]:
    """Write a run's checkpoint as a GGUF file, and its Modelfile; return their paths. An adapter is
    merged into its base first.

    dtype: of DTYPES; None: the checkpoint's. Raises ModelFolderError, StorageError.
    """
    merge_adapter(chosen.folder)
    dtype = dtype or _BY_STORED.get(stored_dtype(chosen.folder) or "", "f16")
    path = output / f"{chosen.name}-{dtype}.gguf"
    words = write_gguf(chosen.folder, path, dtype=dtype, name=chosen.name)
    text = modelfile(
        chosen.folder,
        path.name,
        stops=words.stops,
        temperature=chosen.config.validation_temperature or 0.0,
    )
    write_text(output / "Modelfile", text)
    return [path, output / "Modelfile"]


def write_gguf(folder: Path, path: Path, *, dtype: str, name: str) -> Vocabulary:
    """Write the model in `folder`, with whole weights, to `path`; return its vocabulary.

    dtype: of DTYPES. name: of the model, shown by readers.

    Raises ModelFolderError for a model or tokenizer without an equal in llama.cpp, before anything
    is written; StorageError.
    """
    config = read_config(folder)
    layout = layout_of(config)
    _check_sizes(folder, layout, config)
    words = vocabulary(folder, layout.shape.vocab_size)
    kind, file_type = DTYPES[dtype]
    kinds = {}
    shapes = {}
    sizes = {}
    for ours, tensor in _tensors(folder, layout, config):
        kinds[ours] = _type_of(ours, tensor, kind)
        shapes[ours] = tuple(tensor.shape)
        sizes[ours] = math.prod(gguf.quant_shape_to_byte_shape(shapes[ours], kinds[ours]))
    numbers = numpy.dtype(numpy.float32)
    with (
        atomic_file(path, sum(sizes.values())) as temporary,
        contextlib.closing(GGUFWriter(temporary, layout.target.name)) as to,
    ):
        to.add_name(name)
        to.add_file_type(file_type)
        to.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_settings(to, layout, config)
        words.add_to(to)
        for ours, shape in shapes.items():
            to.add_tensor_info(ours, shape, numbers, sizes[ours], raw_dtype=kinds[ours])
        to.write_header_to_file()
        to.write_kv_data_to_file()
        to.write_ti_data_to_file()
        for ours, tensor in _tensors(folder, layout, config):
            to.write_tensor_data(_encoded(tensor, kinds[ours]))
    return words


def _check_sizes(folder: Path, layout: Layout, config: PretrainedConfig) -> None:
    """Raise ModelFolderError unless config.json has the sizes of the weights: readers of a file
    believe its settings.
    """
    shape = layout.shape
    expected = {
        "tok_embeddings.weight": (shape.vocab_size, shape.hidden_size),
        "layers.0.attn.q_proj.weight": (
            shape.num_attention_heads * shape.head_dim,
            shape.hidden_size,
        ),
    }
    for ours, tensor in iter_weights(folder, "torchtune"):
        found = tuple(tensor.shape)
        if expected.get(ours, found) != found:
            raise ModelFolderError(
                f"{folder}: {ours} has the shape {found}, but by config.json {expected[ours]}; "
                "copy config.json again from the model of these weights"
            )
    if config.max_position_embeddings < 1:
        raise ModelFolderError(
            f"{folder}: max_position_embeddings is {config.max_position_embeddings}; give the "
            "longest sequence in tokens"
        )


def _type_of(name: str, tensor: Tensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return a tensor's type in a file of matrices of this one."""
    if tensor.ndim == 1 or name.startswith("position_embd"):
        kind = GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        return GGMLQuantizationType.F16
    return kind


def _encoded(tensor: Tensor, kind: GGMLQuantizationType) -> "numpy.ndarray[Any, Any]":
    if kind == GGMLQuantizationType.BF16 and tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint8).numpy()
    numbers = tensor.to(torch.float32).contiguous().numpy()
    return numpy.ascontiguousarray(gguf.quantize(numbers, kind))


def _tensors(
    folder: Path, layout: Layout, config: PretrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield (llama.cpp's name, tensor) of every parameter, in llama.cpp's layout."""
    shape = layout.shape
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    waiting: dict[str, dict[str, Tensor]] = {}
    for ours, tensor in iter_weights(folder, "torchtune"):
        module, kind = ours.rsplit(".", 1)
        if layout.target.turns_pairs and module.rsplit(".", 1)[-1] in heads:
            tensor = _in_pairs(tensor, heads[module.rsplit(".", 1)[-1]])
        if shape.norm == "rms_plus_one" and kind == "scale":
            tensor = tensor.float() + 1
        if not (layout.target.fused_attention and module.endswith(_PARTS)):
            yield layout.name_of(ours), tensor
            continue
        place = f"{layout.name_of(ours).rsplit('.', 2)[0]}.attn_qkv.{kind}"
        parts = waiting.setdefault(place, {})
        parts[module[-6]] = tensor
        if len(parts) == len(_PARTS):
            yield place, torch.cat([waiting[place][part] for part in "qkv"])
            del waiting[place]
    for kind, rope in ropes(shape).items():
        if rope.get("rope_type") == "llama3":
            turned, _ = frequencies(config, kind, layout.context)
            dimensions = 2 * len(turned)
            steps = torch.arange(0, dimensions, 2, dtype=torch.int64).float() / dimensions
            yield "rope_freqs.weight", 1 / (rope["rope_theta"] ** steps) / turned


def _in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Return queries or keys with the halves of each head interleaved: RoPE turns dimension i of
    the first half with dimension i of the second, here neighbours.
    """
    by_head = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return by_head.transpose(1, 2).reshape(tensor.shape)


def _add_settings(to: GGUFWriter, layout: Layout, config: PretrainedConfig) -> None:
    shape = layout.shape
    to.add_vocab_size(shape.vocab_size)
    to.add_context_length(shape.learned_positions or layout.context)
    to.add_embedding_length(shape.hidden_size)
    to.add_block_count(shape.num_hidden_layers)
    to.add_feed_forward_length(shape.intermediate_size)
    to.add_head_count(shape.num_attention_heads)
    to.add_head_count_kv(shape.num_key_value_heads)
    to.add_key_length(shape.head_dim)
    to.add_value_length(shape.head_dim)
    if shape.norm == "layer":
        to.add_layer_norm_eps(shape.norm_eps)
    else:
        to.add_layer_norm_rms_eps(shape.norm_eps)
    if shape.attention_soft_cap:
        to.add_attn_logit_softcapping(shape.attention_soft_cap)
    if shape.output_soft_cap:
        to.add_final_logit_softcapping(shape.output_soft_cap)
    if layout.window is not None:
        to.add_sliding_window(layout.window)
    if layout.windowed is not None:
        to.add_sliding_window_pattern(layout.windowed)
    for kind, rope in ropes(shape).items():
        if kind == "sliding_attention":
            to.add_rope_freq_base_swa(rope["rope_theta"])
            continue
        to.add_rope_dimension_count(shape.head_dim)
        to.add_rope_freq_base(rope["rope_theta"])
        if rope.get("rope_type") == "linear":
            to.add_rope_scaling_type(RopeScalingType.LINEAR)
            to.add_rope_scaling_factor(rope["factor"])
        if rope.get("rope_type") == "yarn":
            to.add_rope_scaling_type(RopeScalingType.YARN)
            to.add_rope_scaling_factor(rope["factor"])
            original = rope.get("original_max_position_embeddings")
            to.add_rope_scaling_orig_ctx_len(original or int(config.max_position_embeddings))
            to.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
            to.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)

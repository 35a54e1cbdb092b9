"""Build the recipes' decoder: torchtune's skeleton around our attention, RoPE and norms.
TransformerDecoder, its layers and FeedForward stay usable with torchtune's tools for checkpointing,
sharding and LoRA.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder
from transformers import PretrainedConfig

from ttrl.training.kernels.attention import AttentionPlan
from ttrl.training.kernels.widening import Linear, TiedLinear, widened
from ttrl.training.models.architecture import Architecture, architecture, uses_transformers
from ttrl.training.models.blocks import layer, norm
from ttrl.training.models.rope import RotaryEmbedding
from ttrl.training.models.transformers_decoder import TransformersDecoder


class Decoder(TransformerDecoder):
    """torchtune's decoder with one RoPE computation per pass, and hidden states as its output.
    The config's dropout is never applied: trainer and sampler must compute the same model."""

    rope: RotaryEmbedding
    pos_embeddings: nn.Embedding | None
    config: PretrainedConfig
    context: int | None
    """The longest sequence in tokens, as it was given to `build_decoder`."""
    architecture: Architecture
    output_soft_cap: float | None
    """Logits are cap·tanh(logits/cap) unless None (Gemma 2)."""

    def hidden_states(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        plan: AttentionPlan,
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Return final hidden states [B, T, D], normed, not yet projected to the vocabulary. watch:
        callback for each layer's number and output hidden states."""
        h: Tensor = self.tok_embeddings(tokens_BT)
        device = h.device.type
        h = widened(h)  # layers add up in fp32, even if embeddings are held or gathered in 16 bits
        dtype = h.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        scale = self.architecture.embedding_scale
        if scale is not None:
            # Rounded to the dtype of the computation, as in the original, in transformers and in
            # vLLM.
            h = h * torch.tensor(scale, dtype=dtype, device="cpu").item()
        if self.pos_embeddings is not None:
            h = h + self.pos_embeddings(positions_BT)
        if self.architecture.embedding_norm:
            h = self.norm(h)
        rotary = self.rope(positions_BT, dtype)
        for number, block in enumerate(self.layers):
            h = block(h, mask=plan, input_pos=rotary)
            if watch is not None:
                watch(number, h)
        normed: Tensor = self.norm(h)
        return normed

    def logits(self, h: Tensor) -> Tensor:
        """Map hidden states [..., D] → logits [..., V] in fp32 or wider, capped if the model does
        so.
        """
        logits: Tensor = self.output(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.output_soft_cap
        if cap is None:
            return logits
        return torch.tanh(logits / cap) * cap

    def materialise_buffers(self, device: torch.device | str) -> None:
        """Compute on `device` the buffers of a decoder built on the meta device."""
        self.rope.materialise(device)


def build_decoder(
    config: PretrainedConfig, context: int | None = None
) -> "Decoder | TransformersDecoder":
    """Build a decoder of the config's shape on the current default device (the meta device too) and
    dtype, with parameters yet to be loaded.

    context: the longest sequence in tokens, for the RoPE type depending on it (longrope); None
    takes the config's max_position_embeddings, as vLLM does. Give the same length to the server as
    its max_model_len.
    """
    if uses_transformers(config):
        return TransformersDecoder(config, context)
    shape = architecture(config)
    embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
    decoder = Decoder(
        tok_embeddings=embeddings,
        layers=nn.ModuleList(layer(shape, number) for number in range(shape.num_hidden_layers)),
        max_seq_len=config.max_position_embeddings,
        num_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        norm=norm(shape, shape.hidden_size),
        output=TiedLinear(embeddings)
        if shape.tie_word_embeddings
        else Linear(shape.hidden_size, shape.vocab_size, bias=shape.head_bias),
    )
    if shape.learned_positions:
        decoder.pos_embeddings = nn.Embedding(shape.learned_positions, shape.hidden_size)
    else:
        decoder.pos_embeddings = None
    kinds = tuple(sorted({kind for kind in shape.rope_kinds if kind is not None}))
    decoder.rope = RotaryEmbedding(config, kinds, context or config.max_position_embeddings)
    decoder.context = context
    decoder.config = config
    decoder.architecture = shape
    decoder.output_soft_cap = shape.output_soft_cap
    return decoder

"""Decoders for the recipes, built from a Hugging Face folder's config.json and nothing else.

families      what each model_type means: names of parameters, norms, biases, blocks; one table row per family
architecture  everything that a forward pass needs, read from a config; what we cannot compute is refused, all of it at once
rope          rotary positions of every type
blocks        norms, attention and layers
decoder       torchtune's skeleton with these parts in it
weights       parameters from safetensors and back, under either naming
"""

from ttrl.training.models.architecture import Architecture, architecture, check_same_architecture, read_config
from ttrl.training.models.decoder import Decoder, build_decoder
from ttrl.training.models.families import FAMILIES
from ttrl.training.models.weights import check_weights, iter_weights, to_hugging_face_names

__all__ = [
    "FAMILIES",
    "Architecture",
    "Decoder",
    "architecture",
    "build_decoder",
    "check_same_architecture",
    "check_weights",
    "iter_weights",
    "read_config",
    "to_hugging_face_names",
]

"""Decoders for the recipes: ours, built from a Hugging Face folder's config.json and nothing else,
and transformers' classes.

architecture  everything that a forward pass needs, read from a config; what we cannot compute is
refused, all of it at once
rope          rotary positions of every type
blocks        norms, attention and layers
decoder       torchtune's skeleton with these parts in it
transformers_decoder  transformers' own classes, with attention and recurrences of packed rows
plugged in
layouts       where checkpoints of these classes keep their parameters
weights       parameters from safetensors and back, under either naming
"""

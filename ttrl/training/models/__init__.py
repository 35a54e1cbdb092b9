"""Define decoders for the recipes: ours, built only from a Hugging Face folder's config.json, and
transformers' classes.

architecture  a forward pass's settings, read from a config; unsupported ones are refused, all at
once
rope          rotary positions of every type
blocks        norms, attention and layers
decoder       torchtune's skeleton with these parts in it
transformers_decoder  transformers' own classes, with attention and recurrences of packed rows
plugged in
layouts       the places of parameters in checkpoints of these classes
weights       parameters from safetensors and back, under either naming
"""

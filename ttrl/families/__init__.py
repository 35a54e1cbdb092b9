"""Describe ttrl's model families by the model_type of config.json.

table      one entry for each family: everything else asks here
own        the traits of a dense family for ttrl's own decoder: names, norms, biases
described  the layers of the families computed by transformers' own classes
layers     parts of layers, counted
values     the numbers in a config.json

Needs only the standard library: plans, vLLM's arguments and the trainer read the same entry.
"""

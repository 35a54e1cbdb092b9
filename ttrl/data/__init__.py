"""From task results to packed tensors: tokens, advantages, rows with shared prompts, masks and
pictures of them.
"""

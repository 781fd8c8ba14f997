"""Sampling of tokens from logits: penalties, grammars, draws, and logprobs."""

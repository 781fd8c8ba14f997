"""Tokenizer, detokenizer, end tokens and stop strings."""

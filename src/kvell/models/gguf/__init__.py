"""Models that are one GGUF file: its header, config, names, blocks and tokenizer."""

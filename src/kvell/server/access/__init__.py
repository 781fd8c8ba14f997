"""Who may ask, how much, and which bodies are read; decisions alone, no I/O but the key file."""

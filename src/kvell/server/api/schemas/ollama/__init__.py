"""Bodies of Ollama's requests, and their translation to chat and completions."""

"""OpenAI's request bodies, with vLLM's extensions: fields and their bounds."""

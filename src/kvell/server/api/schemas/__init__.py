"""OpenAI's request bodies, with vLLM's extensions: what is read, and within which bounds."""

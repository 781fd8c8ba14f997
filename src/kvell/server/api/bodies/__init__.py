"""OpenAI's response bodies, as plain dictionaries."""

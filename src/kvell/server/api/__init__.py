"""The HTTP API of OpenAI and Anthropic: request bodies, responses, errors, streams."""

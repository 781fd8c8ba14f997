"""OpenAI's API: request bodies, responses, errors, streams."""

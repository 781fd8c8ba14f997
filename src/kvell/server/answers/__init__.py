"""A chat answer's text to OpenAI's parts: content, reasoning and tool calls; and what tools are."""

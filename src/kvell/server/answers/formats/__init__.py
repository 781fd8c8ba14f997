"""The formats in which models write tool calls and reasoning, one family per file."""

"""How models write tool calls and reasoning, one family per file."""

"""Parsers of a chat answer's text into content, reasoning and tool calls; checks of tools."""

"""Arguments of :class:`kvell.LLM` and :class:`kvell.AsyncEngine` that become settings."""

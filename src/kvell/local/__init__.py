"""Parts of ``kvell.LLM``: its engine on a thread, its requests in progress, and their outputs."""

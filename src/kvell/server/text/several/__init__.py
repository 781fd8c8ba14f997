"""Several requests for one client: concurrent prompts, and beams."""

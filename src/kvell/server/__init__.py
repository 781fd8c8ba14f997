"""The HTTP face: a front process that speaks OpenAI's API and hands work to an instance."""

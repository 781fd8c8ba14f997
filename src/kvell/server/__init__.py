"""The HTTP server: a front process that serves OpenAI's API and submits requests to instances."""

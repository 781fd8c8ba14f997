"""The engine without a model: requests in, plans and events out, and the journal of its inputs."""

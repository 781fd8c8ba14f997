"""Step plans: the requests that run, and the work of a step."""

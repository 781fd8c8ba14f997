"""The words of the engine: a request, its limits, the plan of one step."""

"""The engine's vocabulary: a request, its limits, the plan of one step."""

"""From a model directory to a model that can compute."""

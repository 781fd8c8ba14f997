"""Loading of a model directory."""

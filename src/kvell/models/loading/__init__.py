"""Loads a model directory into a model that can compute."""

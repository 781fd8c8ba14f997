"""Sections of a step's requests that other instances compute, and what computes them for others."""

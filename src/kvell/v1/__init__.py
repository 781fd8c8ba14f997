"""Modules at the places of vLLM's."""

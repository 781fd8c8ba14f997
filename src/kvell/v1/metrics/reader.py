"""Figures of an engine, by the names of vLLM's module."""

from kvell.local.metrics import Counter, Gauge, Metric, Vector

__all__ = ["Counter", "Gauge", "Metric", "Vector"]

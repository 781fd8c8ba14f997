"""Prometheus metrics of the front and the instance, and ``/debug/memory``."""

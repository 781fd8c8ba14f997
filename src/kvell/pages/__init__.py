"""Sizes, large-page pool, per-group small pages, audit."""

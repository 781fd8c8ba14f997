"""Decisions that concern more than one instance, made in one place."""

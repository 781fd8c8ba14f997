"""Shared parts of all commands: options, environment, errors, files, progress, tables."""

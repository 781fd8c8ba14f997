"""Handlers of requests; each class installs its own routes."""

"""Handlers, by what they serve; each class installs its own routes."""

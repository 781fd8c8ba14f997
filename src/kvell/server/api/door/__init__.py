"""Middleware that runs before a handler: browsers, keys, bounds, headers of a body."""

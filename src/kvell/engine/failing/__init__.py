"""Failed steps and requests, and their effect on other requests."""

"""Requests that move between instances, and texts that follow them or are fetched for them."""

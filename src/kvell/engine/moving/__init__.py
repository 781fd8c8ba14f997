"""Requests that move between instances, and the copies of text before and after them."""

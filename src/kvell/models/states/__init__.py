"""Recurrent layers: states in pages, and the scans that advance them."""

"""``kvell top``: a live view of a running server's memory and requests."""

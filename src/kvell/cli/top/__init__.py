"""``kvell top``: a running server's memory and requests, live."""

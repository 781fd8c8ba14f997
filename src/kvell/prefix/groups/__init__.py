"""What each kind of layer group asks of the cache."""

"""What a request passes before a handler sees it: browsers, keys, bounds, headers of a body."""

"""A server's log: lines of text or JSON, on a stream that the command chooses."""

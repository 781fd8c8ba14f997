"""What a server says while it runs: lines of text or JSON, on a stream that the command chooses."""

"""Text on its way in and out: token ids, stop strings, usage."""

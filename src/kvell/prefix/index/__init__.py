"""The radix tree of cached prefixes, and the longest hit in it."""

"""Which cached page is evicted first, and which prefixes are protected."""

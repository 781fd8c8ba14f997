"""Which cached page goes first, and which prefixes are protected."""

"""Texts that move from one instance's pages to another's: offered by one, pulled by the other."""

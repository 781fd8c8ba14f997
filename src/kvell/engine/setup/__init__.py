"""What an engine is made of: options, sizes, the memory contract, what is refused."""

"""Setting up an engine: options, sizes, the memory contract, and which options are refused."""

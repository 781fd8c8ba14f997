"""Which sections of whose requests lie at which other instance: the paper's gManager."""

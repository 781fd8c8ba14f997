"""Building blocks of the formats' parsers: chains of modes, markers, brackets, JSON."""

"""What all formats are read with: chains of modes, markers, brackets, JSON."""

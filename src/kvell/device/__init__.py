"""Physical memory: chunks and where they are mapped."""

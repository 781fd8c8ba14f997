"""Physical memory: chunks and their mappings."""

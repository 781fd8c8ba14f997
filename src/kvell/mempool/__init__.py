"""The memory of all instances behind one API (MemServe §4)."""

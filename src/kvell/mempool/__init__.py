"""The memory of all instances behind one set of calls (MemServe §4)."""

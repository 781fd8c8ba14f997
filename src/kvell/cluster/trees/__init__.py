"""Which instances have a prompt's prefixes cached, as they tell it (MemServe §6)."""

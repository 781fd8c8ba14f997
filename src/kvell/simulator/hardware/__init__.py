"""How long a step takes on a device, and what it keeps in memory."""

"""Duration of a step on a device, and its activation memory."""

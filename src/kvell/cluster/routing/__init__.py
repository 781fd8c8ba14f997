"""Which instance gets a request, by policies over views of the instances."""

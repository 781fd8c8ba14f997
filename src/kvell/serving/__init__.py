"""The instance's side of the protocol: a loop around an engine, and its fronts' connections."""

"""The instance's side of the protocol: the engine loop and the connections of its fronts."""

"""A front's side of a cluster with a manager: whom it hears, and which instances it reaches."""

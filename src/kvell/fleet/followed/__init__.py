"""A front's side of a cluster: its connections to the manager and to the instances."""

"""The manager of a cluster, which owns the instances of several fronts; its state is soft."""

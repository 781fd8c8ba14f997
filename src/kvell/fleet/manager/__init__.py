"""The manager of a cluster: which instances there are, for several fronts; its state is soft."""

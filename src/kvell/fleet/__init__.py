"""The instances of a server, owned by a front or by the manager of a cluster."""

"""The reference of the HTTP API: what its fields mean, and its pages."""

"""Pages in host memory: of preempted and parked requests, and of cached prefixes."""

"""Paths that operators' programs and open pages of the memory map read again and again."""

WATCHED = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})
"""Probes and scrapes; a busy server answers them, too."""
READ_OFTEN = WATCHED | {"/", "/cluster", "/load", "/version"}
BELOW = "/debug/"
READS = ("GET", "HEAD")


def is_monitoring(method: str, path: str) -> bool:
    reads = method in READS and (path in READ_OFTEN or path.startswith(BELOW))
    return reads or path in WATCHED  # SageMaker's probe is a POST

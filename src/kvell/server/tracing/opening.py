"""The tracer of ``--otlp-traces-endpoint``, and checks of its address."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvell.errors import ChangeSomething

if TYPE_CHECKING:
    from kvell.server.access.traced_visit import Tracer

FLAG = "--otlp-traces-endpoint"
TRACES_PATH = "/v1/traces"
"""The collectors' path for traces; the default of an address without a path."""


def traces_to(endpoint: str) -> "AbstractContextManager[Tracer]":
    """Return a context that yields a tracer.

    :raises ChangeSomething: when the address is invalid, or packages are missing.
    """
    url = checked_endpoint(endpoint)
    from kvell.server.tracing.exporting import exporting

    return exporting(url)


def checked_endpoint(endpoint: str) -> str:
    """Check that spans can be exported; return the collector's address with a path.

    :raises ChangeSomething: when the address is invalid, or packages are missing.
    """
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises if it is not a port
    except ValueError:
        is_address = False
    if not is_address:
        remedy = f"use one like http://127.0.0.1:4318{TRACES_PATH}"
        raise ChangeSomething(FLAG, endpoint, "is not an address of a collector", remedy)
    try:
        import kvell.server.tracing.exporting  # noqa: F401
    except ImportError as error:
        problem = f"needs packages that are not installed ({error})"
        raise ChangeSomething(FLAG, endpoint, problem, "pip install 'kvell[otel]'") from error
    if parts.path in ("", "/"):
        parts = parts._replace(path=TRACES_PATH)
    return parts.geturl()

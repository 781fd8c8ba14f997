"""From ``--otlp-traces-endpoint`` to a tracer, or to what is wrong with it."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvell.errors import ChangeSomething

if TYPE_CHECKING:
    from kvell.server.tracing.traced_visit import Tracer

FLAG = "--otlp-traces-endpoint"
TRACES_PATH = "/v1/traces"
"""Where collectors take traces; an address without a path means it."""


def traces_to(endpoint: str) -> "AbstractContextManager[Tracer]":
    """Trace while the block runs.

    :raises ChangeSomething: when the address is none, or packages are missing.
    """
    url = checked_endpoint(endpoint)
    from kvell.server.tracing.exporting import exported

    return exported(url)


def checked_endpoint(endpoint: str) -> str:
    """A collector's whole address, once it is sure that spans can be sent.

    :raises ChangeSomething: when the address is none, or packages are missing.
    """
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises for what is no port
    except ValueError:
        is_address = False
    if not is_address:
        remedy = f"use one like http://127.0.0.1:4318{TRACES_PATH}"
        raise ChangeSomething(FLAG, endpoint, "is no address of a collector", remedy)
    try:
        import kvell.server.tracing.exporting  # noqa: F401
    except ImportError as error:
        problem = f"needs packages that are not installed ({error})"
        raise ChangeSomething(FLAG, endpoint, problem, "pip install 'kvell[otel]'") from error
    if parts.path in ("", "/"):
        parts = parts._replace(path=TRACES_PATH)
    return parts.geturl()

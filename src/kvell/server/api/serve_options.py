"""Where and within which bounds a server serves."""

from dataclasses import dataclass, field

from kvell.server.front.front import FrontLimits

MAX_BODY_BYTES = 32 << 20


@dataclass(frozen=True)
class ServeOptions:
    """Where and within which bounds to serve.

    :param port: 0 takes any free port.
    :param api_key: when given, ``/v1/`` answers only to it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    limits: FrontLimits = field(default_factory=FrontLimits)

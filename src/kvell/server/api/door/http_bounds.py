"""Bounds of HTTP connections: their number and their time limits."""

from dataclasses import dataclass

from kvell.flags import setting

MAX_CONNECTIONS = 4096
"""More than may run and wait by default, so that a request too many receives an error."""


KEEP_ALIVE_SECONDS = 5


@dataclass(frozen=True)
class HttpBounds:
    """Bounds of connections over HTTP.

    :param head_seconds: limit until the head of a request is complete, from the connection's start
        or, on a reused connection, from the head's first byte.
    :param body_seconds: limit until a request's body is complete, plus a second for each
        ``body_bytes_per_second`` received.
    :param unread_seconds: period in which a client with an unread answer must read at least
        ``read_bytes_per_second``.
    """

    max_connections: int = setting(
        MAX_CONNECTIONS,
        "--max-connections",
        "Maximum number of open connections; beyond it, the longest idle one is closed.",
        "integer",
        metavar="",
        least=16,
    )
    keep_alive_seconds: int = setting(
        KEEP_ALIVE_SECONDS,
        "--keep-alive-seconds",
        "Time limit between an answer and the connection's next request.",
        "integer",
        metavar="SECONDS",
    )
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    body_bytes_per_second: int = 16 << 10
    unread_seconds: float = 60.0
    read_bytes_per_second: int = 1 << 10

    @property
    def most_served(self) -> int:
        """The maximum number of requests that await answers.

        The other connections let a full server answer probes, and refuse requests with an error.
        """
        return self.max_connections - max(4, self.max_connections // 16)

    def seconds_for_body(self, received_bytes: int) -> float:
        return self.body_seconds + received_bytes / self.body_bytes_per_second


DEFAULT = HttpBounds()

"""Bounds of the HTTP face's connections: how many, and how long each may take for what."""

from dataclasses import dataclass

MAX_CONNECTIONS = 4096
"""More than requests that may run and wait by default, so that requests are refused by name."""
KEEP_ALIVE_SECONDS = 5


@dataclass(frozen=True)
class HttpBounds:
    """Bounds of connections over HTTP.

    :param max_connections: open at once; fewer where descriptors do not suffice.
    :param keep_alive_seconds: between an answer and the next request of a connection.
    :param head_seconds: in which the head of a request must be complete, from the connection's
        start or, on a connection that was used before, from the head's first byte.
    :param body_seconds: in which a request's body must be complete, and longer by a second for
        each ``body_bytes_per_second`` of it that came.
    :param unread_seconds: within which a client whose answer piles up must read of it at least
        ``read_bytes_per_second``.
    """

    max_connections: int = MAX_CONNECTIONS
    keep_alive_seconds: int = KEEP_ALIVE_SECONDS
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    body_bytes_per_second: int = 16 << 10
    unread_seconds: float = 60.0
    read_bytes_per_second: int = 1 << 10

    @property
    def most_served(self) -> int:
        """Requests whose answers are awaited at once.

        Some connections are left for clients that have not asked yet, so that they can be told that
        the server is full, and so that probes of its health are answered.
        """
        return self.max_connections - max(4, self.max_connections // 16)

    def seconds_for_body(self, received_bytes: int) -> float:
        """Seconds that a body may take if so much of it came."""
        return self.body_seconds + received_bytes / self.body_bytes_per_second


DEFAULT = HttpBounds()

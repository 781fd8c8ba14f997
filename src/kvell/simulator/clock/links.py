"""Links of the virtual network, their deliveries and their counters."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Properties of one direction between two endpoints.

    :param latency_seconds: from the last byte sent to the message's arrival.
    :param bandwidth_bytes: per second; messages queue, even lost ones.
    :param loss: part of the messages that never arrive.
    :param duplication: part of the arriving messages that arrive twice.
    :param jitter_seconds: added latency is uniform in [0, jitter), drawn for each copy. Without
        jitter a link keeps messages in order, even when a faster link replaces it.
    :raises ValueError: for a number out of range.
    """

    latency_seconds: float = 0.0
    bandwidth_bytes: float = math.inf
    loss: float = 0.0
    duplication: float = 0.0
    jitter_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.loss <= 1 and 0 <= self.duplication <= 1):
            raise ValueError(f"loss and duplication must be between 0 and 1: {self}")
        if not (0 <= self.latency_seconds < math.inf and 0 <= self.jitter_seconds < math.inf):
            raise ValueError(f"latency and jitter must be finite and at least 0 seconds: {self}")
        if not self.bandwidth_bytes > 0:
            raise ValueError(f"bandwidth must be above 0: {self}")


@dataclass(frozen=True)
class Delivery:
    """One copy of a message that has arrived.

    :param number: the message's position among all messages sent on its link, from 0.
    :param size_bytes: size of the message on the link.
    """

    sender: str
    receiver: str
    payload: bytes
    number: int
    sent_seconds: float
    due_seconds: float
    size_bytes: int


@dataclass(frozen=True)
class LinkStats:
    """Counts of a link's messages; ``sent + duplicated`` is the sum of the other counts.

    :param lost: lost at random.
    :param cut: lost because the link was cut at sending or in flight.
    :param in_flight: copies that are not due yet, or not taken.
    """

    sent: int = 0
    duplicated: int = 0
    delivered: int = 0
    lost: int = 0
    cut: int = 0
    in_flight: int = 0
    sent_bytes: int = 0
    delivered_bytes: int = 0

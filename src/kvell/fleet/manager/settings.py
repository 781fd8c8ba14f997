"""What the manager of a cluster is started with: the same at its first start and at all others."""

import hashlib

import msgspec

from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.wire.decoding import decode


class ClusterSettings(msgspec.Struct, frozen=True):
    """Chosen by the front that comes first.

    :param name: of the cluster.
    :param command: an instance's arguments.
    :param counts: how many instances of each role to start.
    :param pool: how they share their memory.
    :param secret: that all of the cluster know.
    """

    name: str
    command: tuple[str, ...]
    counts: dict[str, int]
    limits: FrontLimits
    pool: PoolSettings
    secret: bytes

    @property
    def fingerprint(self) -> str:
        """Of what the other fronts must have chosen too."""
        chosen = msgspec.msgpack.encode((self.command, self.pool))
        return hashlib.sha256(chosen).hexdigest()

    def encoded(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decoded(body: bytes) -> "ClusterSettings":
        """From bytes."""
        return decode(_SETTINGS, body)


_SETTINGS = msgspec.msgpack.Decoder(ClusterSettings)

"""The settings of a cluster's manager, the same at each of its starts."""

import hashlib

import msgspec

from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.wire.decoding import decode


class ClusterSettings(msgspec.Struct, frozen=True):
    """Settings of a cluster, chosen by its first front.

    :param name: of the cluster.
    :param command: an instance's arguments.
    :param counts: number of instances of each role to start.
    :param pool: how the instances share their memory.
    :param secret: shared by all processes of the cluster.
    """

    name: str
    command: tuple[str, ...]
    counts: dict[str, int]
    limits: FrontLimits
    pool: PoolSettings
    secret: bytes

    @property
    def fingerprint(self) -> str:
        chosen = msgspec.msgpack.encode((self.command, self.pool))
        return hashlib.sha256(chosen).hexdigest()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(body: bytes) -> "ClusterSettings":
        return decode(_SETTINGS, body)


_SETTINGS = msgspec.msgpack.Decoder(ClusterSettings)

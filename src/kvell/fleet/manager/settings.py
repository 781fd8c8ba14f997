"""The settings of a cluster's manager, the same at each of its starts."""

import hashlib

import msgspec

from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings


class ClusterSettings(msgspec.Struct, frozen=True):
    """Settings of a cluster, chosen by its first front."""

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

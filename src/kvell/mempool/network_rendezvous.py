"""Where instances of several hosts meet: addresses that their front tells each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching, PoolRole
from kvell.wire.endpoints import Endpoint, tcp_endpoint


@dataclass(eq=False)
class NetworkRendezvous:
    """A :class:`.Rendezvous` without a common folder; pages cross over TCP.

    :param instance: its name, unique in the pool.
    :param pool: name of the pool; instances of different ones refuse each other.
    :param host: address of this host, at which the others reach it.
    :param key: the secret that all instances of the pool know.
    :param role: what it does.
    :param pd_caching: who caches what.
    :ivar listens: where it listens; "" before :meth:`publish`.
    """

    instance: str
    pool: str
    host: str
    key: bytes = field(repr=False)
    role: PoolRole = "mixed"
    pd_caching: PdCaching = DEFAULT_PD_CACHING
    listens: str = field(default="", init=False)
    _known: Mapping[str, str] = field(default_factory=dict, init=False)

    def secret(self) -> bytes:
        """What all instances of the pool know."""
        return self.key

    def address(self) -> Endpoint:
        """Where to listen: a free port of this host's address."""
        return tcp_endpoint(self.host, 0)

    def publish(self, address: Endpoint | None) -> None:
        """Keep the address, which the front is told with ``Ready``."""
        self.listens = address if isinstance(address, str) else ""

    def meet(self, addresses: Mapping[str, str]) -> None:
        """Take in where all instances listen; what was known before does not count any more."""
        self._known = dict(addresses)

    def address_of(self, instance: str) -> Endpoint:
        """Where another instance listens.

        :raises OSError: when the front has not told it.
        """
        if instance not in self._known:
            raise OSError(f"nobody has told where {instance} listens")
        return self._known[instance]

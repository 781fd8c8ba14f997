"""The rendezvous of instances on several hosts, whose addresses the front sends to each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching, PoolRole
from kvell.wire.endpoints import Endpoint, tcp_endpoint


@dataclass(eq=False)
class NetworkRendezvous:
    """A :class:`.Rendezvous` without a common folder; pages are sent over TCP.

    :param instance: the name of the instance, unique in the pool.
    :param pool: the name of the pool; instances of different pools refuse each other.
    :param host: the address of this host for the other instances.
    :param key: the secret of the pool.
    :ivar listens: the address of the listener; "" before :meth:`publish`.
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
        return self.key

    def address(self) -> Endpoint:
        """Return the address to listen at: a free port of this host's address."""
        return tcp_endpoint(self.host, 0)

    def publish(self, address: Endpoint | None) -> None:
        self.listens = address if isinstance(address, str) else ""

    def meet(self, addresses: Mapping[str, str]) -> None:
        self._known = dict(addresses)

    def address_of(self, instance: str) -> Endpoint:
        """Return the address of another instance.

        :raises OSError: when the front has not sent it.
        """
        if instance not in self._known:
            raise OSError(f"the address of {instance} is unknown")
        return self._known[instance]

"""How attention reads what peers lend: in place where both are on one host, else by asking them."""

from kvell.mempool.entries import BY_QUERIES, NOT_IN_PLACE
from kvell.mempool.transports.mapped import MappedPages
from kvell.mempool.transports.neighbours import Neighbours
from kvell.mempool.transports.peer import Peer
from kvell.mempool.transports.tcp.partials import PartialsLine

Incarnation = tuple[str, int]


class Creditors:
    """The peers that may lend to one instance.

    :param neighbours: places behind the own pool for those of peers on this host.
    :param fingerprint: of the own layout; peers with another one lend nothing.
    """

    def __init__(self, neighbours: Neighbours | None, fingerprint: str) -> None:
        self._neighbours, self._fingerprint = neighbours, fingerprint
        self._in_place: dict[Incarnation, list[MappedPages]] = {}
        self._asked: dict[Incarnation, PartialsLine] = {}

    def meet(self, peer: Peer) -> int | None:
        """Let attention read what a peer will lend; return where, as :class:`.PeerMapped` says it.

        None for one that lends nothing here.
        """
        told, source = peer.told, peer.source
        if self._neighbours is None or told.fingerprint != self._fingerprint:
            return None
        key = told.instance, told.incarnation
        if isinstance(source, MappedPages):
            self._in_place.setdefault(key, []).append(source)
            return source.put_behind(self._neighbours)
        if peer.partials is None:
            return NOT_IN_PLACE
        self._asked[key] = peer.partials
        return BY_QUERIES

    def stands(self, instance: str, incarnation: int, number: int) -> bool:
        """Whether what is read in place may still be read; from any thread."""
        met = self._in_place.get((instance, incarnation))
        return met[0].stands(number) if met else False

    def partials(self, instance: str, incarnation: int) -> PartialsLine | None:
        """Where an instance is asked that is not read in place; from any thread."""
        return self._asked.get((instance, incarnation))

    def take_away(self, instance: str, incarnation: int) -> None:
        """Forget the pool of an instance that is gone, once no step reads it; from any thread."""
        met = self._in_place.get((instance, incarnation))  # maybe again, behind this loss
        if met:
            met.pop(0).take_away()
        asked = self._asked.get((instance, incarnation))
        if asked is not None and asked.is_closed:
            del self._asked[instance, incarnation]

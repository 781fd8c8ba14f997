"""The access of attention to borrowed pages: in place on the same host, otherwise by queries."""

from kvell.mempool.entries import BY_QUERIES, NOT_IN_PLACE
from kvell.mempool.transports.mapped import MappedPages
from kvell.mempool.transports.neighbours import MappedPeers
from kvell.mempool.transports.peer import Peer
from kvell.mempool.transports.tcp.partials import PartialsLine

Incarnation = tuple[str, int]


class Creditors:
    """The peers that may lend to one instance.

    :param neighbours: maps pools of peers on this host after this pool.
    :param fingerprint: the fingerprint of this layout; peers with another one lend no pages.
    """

    def __init__(self, neighbours: MappedPeers | None, fingerprint: str) -> None:
        self._neighbours, self._fingerprint = neighbours, fingerprint
        self._in_place: dict[Incarnation, list[MappedPages]] = {}
        self._asked: dict[Incarnation, PartialsLine] = {}

    def meet(self, peer: Peer) -> int | None:
        """Let attention read the pages that a peer will lend.

        :returns: ``first_large`` of :class:`.PeerMapped`; None if the peer lends no pages here.
        """
        greeting, source = peer.greeting, peer.source
        if self._neighbours is None or greeting.fingerprint != self._fingerprint:
            return None
        key = greeting.instance, greeting.incarnation
        if isinstance(source, MappedPages):
            self._in_place.setdefault(key, []).append(source)
            return source.put_behind(self._neighbours)
        if peer.partials is None:
            return NOT_IN_PLACE
        self._asked[key] = peer.partials
        return BY_QUERIES

    def stands(self, instance: str, incarnation: int, number: int) -> bool:
        """Return whether a right to read in place is still valid. Any thread may call this."""
        met = self._in_place.get((instance, incarnation))
        return met[0].stands(number) if met else False

    def partials(self, instance: str, incarnation: int) -> PartialsLine | None:
        """Return the line for queries to an instance, if any. Any thread may call this."""
        return self._asked.get((instance, incarnation))

    def take_away(self, instance: str, incarnation: int) -> None:
        """Forget the pool of a dead instance once no step reads it. Any thread may call this."""
        met = self._in_place.get((instance, incarnation))  # it may be connected again already
        if met:
            met.pop(0).take_away()
        line = self._asked.get((instance, incarnation))
        if line is not None and line.is_closed:
            del self._asked[instance, incarnation]

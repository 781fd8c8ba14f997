"""The link of an engine to other instances; by itself, that of an engine alone."""

from collections.abc import Callable, Iterable, Mapping

from kvell.engine.core.loop import PoolIO
from kvell.engine.running.moved_images import MovedImages
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry
from kvell.wire.bell import Bell


class EngineLink(PoolIO):
    """Messages, copies and time between an engine and other instances.

    :ivar bell: rings when :meth:`entries` has entries; the engine may ring it, too.
    :ivar section_bytes: bytes of a section that this instance may borrow; 0: it cannot borrow.
    :ivar asks: whether creditors are queried for attention over their pages, not read in place.
    :ivar host: the host whose instances read each other's pages in place.
    """

    section_bytes = 0
    asks = False
    host = ""

    def __init__(self) -> None:
        self.bell = Bell()

    @property
    def is_linked(self) -> bool:
        return False

    @property
    def listens(self) -> str:
        """The address for instances on other hosts; "" in a pool of one host."""
        return ""

    def move_images(self, make: Callable[[Agent], MovedImages]) -> None:
        """Send and receive the images of requests that move."""

    def meet(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of the other instances, in a pool of several hosts."""

    @property
    def has_entries(self) -> bool:
        return False

    def entries(self) -> Iterable[PeerEntry]:
        """Yield the entries since the last call; the core processes each before the next."""
        return ()

    def close(self) -> None:
        """Close all connections."""

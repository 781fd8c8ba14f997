"""The link of an engine to other instances, as the engine uses it, and the link of one alone."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from typing_extensions import override

from kvell.engine.core.loop import NoTransport, PageTransport
from kvell.engine.running.moved_images import MovedImages
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry
from kvell.wire.bell import Bell


class EngineLink(PageTransport, Protocol):
    """Messages, copies and time between an engine and other instances.

    :ivar bell: rings when :meth:`entries` has entries; the engine may ring it, too.
    :ivar section_bytes: bytes of a section that this instance may borrow; 0: it cannot borrow.
    """

    bell: Bell
    section_bytes: int

    @property
    def is_linked(self) -> bool:
        """Whether other instances read this engine's pool."""
        ...

    @property
    def listens(self) -> str:
        """The address for instances on other hosts; "" in a pool of one host."""
        ...

    def move_images(self, make: Callable[[Agent], MovedImages]) -> None:
        """Send and receive the images of requests that move."""
        ...

    def meet(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of the other instances, in a pool of several hosts."""
        ...

    def entries(self) -> Iterable[PeerEntry]:
        """Yield the entries since the last call; the core processes each before the next."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class NoLink(NoTransport, EngineLink):
    """The link of an engine that no other instance reaches."""

    section_bytes = 0
    is_linked = False
    listens = ""

    def __init__(self) -> None:
        self.bell = Bell()

    @override
    def move_images(self, make: Callable[[Agent], MovedImages]) -> None:
        pass

    @override
    def meet(self, addresses: Mapping[str, str]) -> None:
        pass

    @override
    def entries(self) -> Iterable[PeerEntry]:
        return ()

    @override
    def close(self) -> None:
        pass

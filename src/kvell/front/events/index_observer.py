"""Whoever wants to know what instances cache."""

from typing import Protocol

from kvell.engine.protocol.notices import IndexNotice


class IndexObserver(Protocol):
    """Is told in order; an instance that is lost has nothing cached."""

    def noticed(self, instance_id: str, notice: IndexNotice) -> None:
        """An instance came to cache prefixes, or caches them no longer."""
        ...

    def lost(self, instance_id: str) -> None:
        """An instance died or left."""
        ...

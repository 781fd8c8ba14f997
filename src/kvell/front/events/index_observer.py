"""The protocol of observers of cached prefixes."""

from typing import Protocol

from kvell.engine.protocol.notices import IndexNotice


class IndexObserver(Protocol):
    """An observer of the prefixes that instances cache, called in order."""

    def on_notice(self, instance_id: str, notice: IndexNotice) -> None:
        """Handle a notice about prefixes that an instance has cached or evicted."""
        ...

    def lost(self, instance_id: str) -> None:
        """Handle an instance that died or left, and has nothing cached."""
        ...

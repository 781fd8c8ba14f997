"""Settings of the memory and work that the instances of a front share."""

from dataclasses import dataclass

from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PageTransport, PdCaching


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a pool of instances.

    :param pd_caching: which of prefill and decode instances cache what.
    :param page_transport: how pages are copied from one instance to another.
    :param adaptive_roles: whether prefill and decode instances change their roles by load.
    """

    pd_caching: PdCaching = DEFAULT_PD_CACHING
    page_transport: PageTransport = "memory"
    adaptive_roles: bool = False

    def values(self) -> dict[str, str]:
        """Return the settings as arguments of an instance's command line."""
        return {"pd_caching": str(self.pd_caching), "page_transport": self.page_transport}

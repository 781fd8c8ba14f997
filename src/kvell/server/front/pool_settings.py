"""How the instances behind a front share their memory: settings that each of them is given."""

from dataclasses import dataclass

from kvell.mempool.place import DEFAULT_PD_CACHING, PageTransport, PdCaching


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a pool of instances.

    :param pd_caching: which of prefill and decode instances cache what.
    :param page_transport: how pages get from one instance to another.
    """

    pd_caching: PdCaching = DEFAULT_PD_CACHING
    page_transport: PageTransport = "memory"

    def values(self) -> dict[str, str]:
        """As arguments of an instance's command line."""
        return {"pd_caching": str(self.pd_caching), "page_transport": self.page_transport}

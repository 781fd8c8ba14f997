"""Settings of the memory and work that the instances of a front share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from kvell.cluster.instances import check_adaptive_roles, chosen_pd_caching
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief
from kvell.flags import setting
from kvell.mempool.rendezvous import (
    DEFAULT_PD_CACHING,
    PD_CACHING_NAMES,
    PD_CACHINGS,
    PageTransport,
    PdCaching,
)

_TYPED = (*PD_CACHING_NAMES, *map(str, PD_CACHINGS))


def _parse_pd_caching(value: str) -> PdCaching:
    return PD_CACHINGS[_TYPED.index(value) % len(PD_CACHINGS)]


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a pool of instances."""

    pd_caching: PdCaching | None = setting(
        None,
        "--pd-caching",
        "Instances that keep prefixes: none, those of prefill, both kinds, or both with"
        " answers copied to prefill instances.  [default: answers]",
        metavar="[" + "|".join(PD_CACHING_NAMES) + "]",
        choices=_TYPED,
        parse=_parse_pd_caching,
    )
    page_transport: PageTransport = setting(
        "memory",
        "--page-transport",
        "How pages move between instances: through shared memory, or over TCP.",
        choices=get_args(PageTransport),
    )
    adaptive_roles: bool = setting(
        False,
        "--adaptive-roles",
        "Let prefill and decode instances change their roles by load.",
        "mark",
    )
    relief: Relief = setting(
        DEFAULT_RELIEF,
        "--relief",
        "What moves between instances while memory is short: requests and loans of memory, only"
        " loans, loans only to an instance that has hardly any left, only requests, or nothing.",
        choices=get_args(Relief),
    )

    @property
    def caching(self) -> PdCaching:
        return DEFAULT_PD_CACHING if self.pd_caching is None else self.pd_caching

    def values(self) -> dict[str, str]:
        return {"pd_caching": str(self.caching), "page_transport": self.page_transport}

    def resolve(self, counts: Mapping[str, int]) -> "PoolSettings":
        """Return the settings with all defaults in place.

        :param counts: number of instances of each role.
        :raises ChangeSomething: if the settings do not suit the roles.
        """
        caching = chosen_pd_caching(counts, self.pd_caching, "pd_caching")
        if self.adaptive_roles:
            check_adaptive_roles(counts, "adaptive_roles")
        return replace(self, pd_caching=caching)

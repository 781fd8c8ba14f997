"""Names of requests: as callers give them, and as instances know them.

Several fronts may have the same instances, and their clients choose names freely.  So instances
know a request as ``front-3f9a12cc:name``, and what people see is without the front.
"""

from dataclasses import replace

from kvell.engine.protocol.pages import LargePage, Pages
from kvell.serving.gate import NAME_END
from kvell.vocabulary import RequestId


class RequestNames:
    """Names of one front's requests; pure.

    :param front: its name; "" if its instances have no other, and then both names are the same.
    """

    def __init__(self, front: str = "") -> None:
        self.prefix = f"{front}{NAME_END}" if front else ""

    def known(self, shown: str) -> RequestId:
        """The name that instances know."""
        return RequestId(self.prefix + shown)

    def shown(self, known: RequestId) -> RequestId:
        """The name that people see; those of other fronts stay whole."""
        return RequestId(known.removeprefix(self.prefix))

    def pages(self, told: Pages) -> Pages:
        """What an instance tells of its large pages, with the names that people see."""
        if not self.prefix or not told.misses:
            return told
        misses = (replace(one, request_id=self.shown(one.request_id)) for one in told.misses)
        return replace(told, misses=tuple(misses))

    def large_page(self, told: LargePage) -> LargePage:
        """The same of a single large page."""
        if not self.prefix:
            return told
        owners = (replace(one, request_id=self.shown(one.request_id)) for one in told.owners)
        return replace(told, owners=tuple(owners))

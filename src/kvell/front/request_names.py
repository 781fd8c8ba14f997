"""Names of requests: those of callers, and those of instances.

Several fronts may have the same instances, and their clients choose names freely.  So the name at
instances is ``front-3f9a12cc:name``, and the name that people see is without the front.
"""

from dataclasses import replace

from kvell.engine.protocol.pages import LargePage, Pages
from kvell.serving.gate import NAME_END
from kvell.vocabulary import RequestId


class RequestNames:
    """Names of one front's requests; pure.

    :param front: name of the front; "" if its instances have no other: then the names are equal.
    """

    def __init__(self, front: str = "") -> None:
        self.prefix = f"{front}{NAME_END}" if front else ""

    def known(self, shown: str) -> RequestId:
        return RequestId(self.prefix + shown)

    def shorten(self, name: RequestId) -> RequestId:
        """Return the name that people see; names of other fronts stay whole."""
        return RequestId(name.removeprefix(self.prefix))

    def pages(self, pages: Pages) -> Pages:
        if not self.prefix or not pages.misses:
            return pages
        misses = (replace(miss, request_id=self.shorten(miss.request_id)) for miss in pages.misses)
        return replace(pages, misses=tuple(misses))

    def large_page(self, page: LargePage) -> LargePage:
        """Return a large page, with the names that people see."""
        if not self.prefix:
            return page
        owners = (
            replace(owner, request_id=self.shorten(owner.request_id)) for owner in page.owners
        )
        return replace(page, owners=tuple(owners))

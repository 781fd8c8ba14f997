"""Extents: runs of consecutive pages inside one large page.

Tables keep page ids (an ADR says why); extents are the unit in which pages are
moved, swapped, transferred and lent, and they are derived here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvell.vocabulary import LogicalLargePage


@dataclass(frozen=True)
class Extent:
    """Pages ``first_index … first_index+num_pages-1`` of one logical large page.

    :param large_page: its number.
    :param first_index: of the first page, from 0.
    :param num_pages: at least 1.
    """

    large_page: LogicalLargePage
    first_index: int
    num_pages: int

    def split(self, num_pages: int) -> tuple["Extent", "Extent"]:
        """Cut after ``num_pages`` pages, without copying anything.

        :raises ValueError: unless both halves keep at least one page.
        """
        if not 0 < num_pages < self.num_pages:
            raise ValueError(f"cannot cut {self.num_pages} pages after {num_pages}")
        head = Extent(self.large_page, self.first_index, num_pages)
        tail = Extent(self.large_page, self.first_index + num_pages, self.num_pages - num_pages)
        return head, tail


def extents_of(page_ids: Iterable[int], pages_per_large: int) -> Iterator[Extent]:
    """Yield the extents of logical page ids, in their order."""
    start, length = -1, 0
    for page in page_ids:
        if length and page == start + length and page % pages_per_large:
            length += 1
            continue
        if length:
            yield _extent(start, length, pages_per_large)
        start, length = page, 1
    if length:
        yield _extent(start, length, pages_per_large)


def _extent(start: int, length: int, pages_per_large: int) -> Extent:
    large, index = divmod(start, pages_per_large)
    return Extent(LogicalLargePage(large), index, length)

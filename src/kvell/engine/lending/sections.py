"""Sections: a fixed number of tokens of one request, in all groups with full attention."""

from collections.abc import Iterator, Sequence
from itertools import chain

from kvell.engine.requests.plan import NewPages
from kvell.memory import GroupKind, GroupSpec
from kvell.vocabulary import SECTION_TOKENS

Place = tuple[int, int]
"""Group and position of a page."""


class Sections:
    """The pages of a model's sections, in the order of a loan's pages.

    :param groups: all groups of the layout; those of the model with full attention count.
    :param section_tokens: a multiple of their pages' tokens.
    """

    def __init__(self, model: str, groups: Sequence[GroupSpec], section_tokens: int) -> None:
        self._groups = list(full_groups(model, groups))
        self._num_groups = len(groups)
        self._section_tokens = section_tokens

    def page_counts(self) -> list[int]:
        """Return the number of pages of a section, for each group of the layout."""
        counts = [0] * self._num_groups
        for index, group in self._groups:
            counts[index] = self._section_tokens // group.page_tokens
        return counts

    def own(self, held: NewPages, section: int) -> list[int]:
        """Return the local pages of a section.

        :param held: rows [m, 4] of a request: handle, group, position, page.
        """
        page_of = {(group, position): page for _, group, position, page in held.tolist()}
        return [page_of[place] for place in self._places(section)]

    def beyond(
        self, pages: Sequence[Sequence[int]], first_large: int, section: int
    ) -> dict[Place, int]:
        """Return a creditor's pages of a section by place, numbered as pages after the own pool.

        :param pages: pages of the creditor, for each group of the layout.
        :param first_large: the large page at which the creditor's pool begins in these numbers.
        """
        per_large = {index: group.pages_per_large for index, group in self._groups}
        return {
            place: first_large * per_large[place[0]] + page
            for place, page in zip(self._places(section), chain(*pages), strict=True)
        }

    def of_rows(self, rows: NewPages) -> set[int]:
        """Return the sections of rows [m, 4] of one request: handle, group, position, page."""
        tokens = {index: group.page_tokens for index, group in self._groups}
        return {
            position * tokens[group] // self._section_tokens
            for _, group, position, _ in rows.tolist()
            if group in tokens
        }

    def _places(self, section: int) -> Iterator[Place]:
        for index, group in self._groups:
            count = self._section_tokens // group.page_tokens
            for position in range(section * count, (section + 1) * count):
                yield index, position


def full_groups(model: str, groups: Sequence[GroupSpec]) -> Iterator[tuple[int, GroupSpec]]:
    """Yield the groups of a model whose sections may be remote, with their indices."""
    for index, group in enumerate(groups):
        if group.model == model and group.kind is GroupKind.FULL:
            yield index, group


def local_reason(model: str, groups: Sequence[GroupSpec]) -> str:
    """Return why all pages of a model's requests stay here; "" if sections may be remote."""
    seen = [group for group in groups if group.model == model]
    full = [group for _, group in full_groups(model, groups)]
    if not full:
        return "its model has no full attention"
    if any(group.kind is GroupKind.DROPPING for group in seen):
        return "its model drops tokens"
    if any(group.counts_images for group in seen):
        return "its pages hold images among the text"
    if any(SECTION_TOKENS % group.page_tokens for group in full):
        return f"its pages do not divide {SECTION_TOKENS} tokens"
    return ""


def resumes(model: str, groups: Sequence[GroupSpec]) -> bool:
    """Return whether a request can continue after remote sections, without pages here.

    Pages that hold embeddings may be needed for the rest of an image that begins before it.
    """
    seen = [group for group in groups if group.model == model]
    return all(group.kind is GroupKind.FULL and not group.holds_embeddings for group in seen)


def repeats(model: str, groups: Sequence[GroupSpec]) -> bool:
    return all(group.kind is not GroupKind.STATE for group in groups if group.model == model)


def section_bytes(groups: Sequence[GroupSpec], tokens: int = SECTION_TOKENS) -> int:
    """Return the bytes of a section in the groups whose pages may be remote.

    With several models, it is the largest of all, so that no plan takes more than there is.

    :param tokens: tokens in a section.
    """
    models = {group.model for group in groups}
    sizes = (sum(group.token_bytes for _, group in full_groups(m, groups)) for m in models)
    return tokens * max(sizes, default=0)

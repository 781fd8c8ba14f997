"""Holders whose computed tokens come from elsewhere, and the indexed pages that they take."""

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import resumed_from
from tests.oracle.core.publishing import Publisher
from tests.oracle.index.hits import image_places
from tests.oracle.index.radix import Node
from tests.oracle.index.seen import cuts_image
from tests.oracle.placement.holders import GroupPages, Holder
from tests.oracle.placement.store import Store


class Receiver:
    """The start of holders that resume after received tokens."""

    def __init__(self, store: Store, publisher: Publisher) -> None:
        self._store, self._publisher = store, publisher

    def cannot(self, holder: Holder, computed: int) -> bool:
        """Return whether the holder has pages besides its hit or pages that cannot be published,
        or ``computed`` cuts an image."""
        cuts = cuts_image(holder.facts, computed)
        if cuts or holder.computed > holder.hit_tokens or not self._publisher.publishes(holder):
            return True
        for index, held in holder.own_groups():
            group = self._store.groups[index]
            if held.pages and held.end > _pages_of(group, holder.facts, holder.hit_tokens, held):
                return True
        return False

    def receive(self, holder: Holder, computed: int) -> None:
        """Resume after ``computed`` received tokens, without pages before windows and embeddings
        that were read."""
        self._publisher.let_sources_go(holder, renew=True)
        holder.is_receiving, holder.computed = True, computed
        self._publisher.leave_behind(holder)
        for index, held in holder.own_groups():
            if not held.pages:
                group, policy = self._store.groups[index], self._store.policies[index]
                held.first = max(held.first, resumed_from(group, policy, holder.facts, computed))
        self._take_known(holder)

    def _take_known(self, holder: Holder) -> None:
        """Hold indexed pages after the hit.

        The holder takes whole pages, and pages of images, up to the first missing one.  A request
        also keeps later pages of tokens, and states and partly filled pages that end with the
        computed tokens, as copy sources.
        """
        path = list(self._store.tree.walk(holder.root, holder.tokens_to(holder.computed)))
        for index, held in holder.own_groups() if path else ():
            node, matched = path[-1]
            if self._store.groups[index].kind is GroupKind.CROSS:
                self._take_images(holder, index, held, node, matched)
            elif self._store.groups[index].kind.counts_tokens:
                self._take_pages(holder, index, held, node, matched)
            if holder.lease_until is None and matched == holder.computed:
                self._keep_end(holder, index, held, node)

    def _take_images(
        self, holder: Holder, index: int, held: GroupPages, node: Node, matched: int
    ) -> None:
        places = list(image_places(self._store.groups[index], holder.facts, matched))
        for place in places[held.end :]:
            page = self._store.tree.page_at(node, index, place)
            if page is None:
                break
            self._store.pool.acquire(index, page)
            held.pages.append(page)
        held.published = max(held.published, held.end)

    def _take_pages(
        self, holder: Holder, index: int, held: GroupPages, node: Node, matched: int
    ) -> None:
        tree, size = self._store.tree, self._store.groups[index].page_tokens
        for position in range(held.end, matched // size):
            place = ((position + 1) * size, 0)
            page = tree.page_at(node, index, place)
            if position > held.end and holder.lease_until is not None:
                break
            if page is None:
                continue
            self._store.pool.acquire(index, page)
            if position == held.end:
                held.pages.append(page)
            else:
                held.sources[position] = (place, page)
        held.published = max(held.published, held.end)

    def _keep_end(self, holder: Holder, index: int, held: GroupPages, node: Node) -> None:
        group, end = self._store.groups[index], holder.computed
        is_tail = group.kind.counts_tokens and end % group.page_tokens
        if not is_tail and group.kind is not GroupKind.STATE:
            return
        for part in range(group.slices if not is_tail else 1):
            page = self._store.tree.page_at(node, index, (end, part))
            if page is not None:
                self._store.pool.acquire(index, page)
                held.sources[end // group.page_tokens if is_tail else part] = ((end, part), page)


def _pages_of(group: GroupSpec, facts: Facts, hit_tokens: int, held: GroupPages) -> int:
    """Return the position after the last page that a just opened holder may have."""
    if group.kind is GroupKind.VISION:
        return held.end
    if group.kind is GroupKind.CROSS:
        return sum(1 for _ in image_places(group, facts, hit_tokens))
    return hit_tokens // group.page_tokens if group.kind.counts_tokens else 0

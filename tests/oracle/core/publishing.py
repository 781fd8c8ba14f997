"""The changes of a request's pages while it runs: indexed, released before windows, returned."""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind
from kvell.pages.snapshot import Key
from kvell.prefix.groups.facts import ImageSpan
from kvell.prefix.groups.needs import (
    WINDOWS,
    dropped_tokens,
    image_pages,
    kept_from,
    kept_to,
)
from tests.oracle.core.lookup import images_root
from tests.oracle.core.resuming import Resuming
from tests.oracle.eviction.checkpoints import Sort
from tests.oracle.eviction.evictor import NORMAL, SPARE, Ending, class_at
from tests.oracle.index.hits import image_places
from tests.oracle.index.radix import Place
from tests.oracle.index.seen import content_tokens
from tests.oracle.placement.holders import GroupPages, Holder
from tests.oracle.placement.store import Store

_SPREAD = 0x9E3779B1
_IMAGE_RANKS = 1 << 30
"""The number of ranks of images of one age. Ranks are independent of places; images go whole."""


class Publisher:
    """The transition of holders' pages from reserved to used to cached.

    :ivar checkpoint_pages: per group, the pages written so far for states within prompts.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._resuming = store, Resuming(store)
        self.checkpoint_pages = [0] * len(store.groups)

    def advance(self, holder: Holder, computed: int) -> None:
        """Set the holder's computed tokens, and publish and release its pages."""
        before, holder.computed = holder.computed, computed
        holder.is_receiving = False
        if computed > before:
            self.let_sources_go(holder, renew=True)
        self._publish(holder)
        self._publish_embeddings(holder)
        self._publish_states(holder)
        self.leave_behind(holder)
        if before < holder.facts.prompt_tokens <= computed:
            self._drop(holder)

    def give_back(self, holder: Holder, *, renew: bool, returns: bool) -> None:
        holder.is_over = True
        if holder.is_reservation:
            for group, held in holder.own_groups():
                self._release_all(group, held.pages)
            return
        is_known = holder.hit_tokens < holder.computed <= holder.num_tokens
        is_known &= not holder.is_receiving
        has_ended = renew and not returns and holder.is_claimed
        if has_ended and holder.computed <= holder.num_tokens:
            holder.runs = self._store.rule.on_access(self._ending(holder), self._store.step)
        if renew and is_known and self.publishes(holder):
            self.publish_end(holder)
        self.let_sources_go(holder, renew=renew)
        for checkpoint in holder.checkpoints:
            self._release_all(checkpoint.group, checkpoint.pages)
        for group, held in holder.own_groups():
            self.release(holder, group, held, held.pages, self._end_rank(group) if renew else None)
        if renew and self.publishes(holder):
            rule, now = self._store.rule, self._store.step
            ended = rule.ended_at(now, self._resuming.end_step(holder))
            self._renew(holder, self._resuming.points(holder), ended)
            self._renew(holder, self._resuming.waypoints(holder), ended)
            if is_known and self._resuming.needs_an_end(holder):
                useful = self._store.usefulness
                useful.note_wasted(Sort.TURN_END, useful.rank(Sort.TURN_END))

    def _ending(self, holder: Holder) -> Ending:
        length = min(holder.computed, holder.num_tokens)
        return Ending(
            holder.tokens_to(length),
            holder.root,
            len(holder.generated),
            holder.will_return,
        )

    def _key(
        self,
        holder: Holder,
        index: int,
        page: int,
        rank: int,
        time: int,
        length: int,
        place: Place,
        *,
        own: bool = True,
    ) -> Key:
        """Return the key of a page at ``place`` after an access by the holder.

        Unless the request has ended, a cached page keeps its class.

        :param own: whether the holder accesses the page again before and at its end.
        """
        rule, old = self._store.rule, self._store.pool.indexed[index].get(page)
        if holder.runs:
            return rule.key(rank, time, length, class_at(holder.runs, place[0], 0))
        if old is not None and old[0] == NORMAL:
            return rule.key(rank, time, length, rule.eviction_class(old))
        output_tokens = max(0, holder.expected_tokens - holder.facts.prompt_tokens)
        is_running = own and not holder.is_over
        number = rule.class_before(output_tokens, holder.will_return, is_running=is_running)
        return rule.key(rank, time, length, number)

    def _end_rank(self, index: int) -> int:
        """Return the eviction rank of pages that only serve to continue after a request's end."""
        if self._store.groups[index].kind in (GroupKind.STATE, *WINDOWS):
            return self._store.usefulness.rank(Sort.TURN_END)
        return NORMAL

    def _renew(self, holder: Holder, lengths: Sequence[int], time: int) -> None:
        """Count the released pages that a prompt resumes from at ``lengths`` as accessed.

        The other pages of windows are in use.
        """
        holder.renewed_step = self._store.step
        for length in lengths:
            for index, held in holder.own_groups() if length <= holder.published else ():
                for place in self._resuming.needed_places(holder, index, length, held.first):
                    page = self._store.tree.page_at(holder.node, index, place)
                    if page is not None:
                        key = self._key(holder, index, page, NORMAL, time, place[0], place)
                        self._store.pool.acquire(index, page)
                        self._store.pool.release(index, page, key)

    def publishes(self, holder: Holder) -> bool:
        mixed = any(self._store.groups[index].counts_images for index in holder.own)
        return not self.drops(holder) and not (mixed and holder.facts.images)

    def drops(self, holder: Holder) -> bool:
        return any(dropped_tokens(self._store.groups[index], holder.facts) for index in holder.own)

    def _publish(self, holder: Holder) -> None:
        """Name complete pages of tokens and complete images."""
        groups, computed = [self._store.groups[index] for index in holder.own], holder.computed
        sizes = {group.page_tokens for group in groups if group.kind.counts_tokens}
        whole = [computed // size * size for size in sizes]
        if any(group.kind is GroupKind.CROSS for group in groups):
            whole.extend(image.end for image in holder.facts.images if image.end <= computed)
        if not self.publishes(holder):
            return
        is_longer = max(whole, default=0) > holder.published
        if is_longer:
            self._extend(holder, max(whole))
        for index, held in holder.own_groups():
            self._publish_returned(holder, index, held)
            if is_longer:
                self._publish_whole(holder, index, held)
        if is_longer and self._store.step - holder.renewed_step >= self._resuming.renew_steps(
            holder
        ):
            self._renew(holder, self._resuming.points(holder), self._store.step)

    def _extend(self, holder: Holder, length: int) -> None:
        """Insert the holder's tokens up to ``length`` into the tree."""
        node = self._store.tree.extend(holder.node, holder.published, holder.tokens_to(length))
        self._store.tree.hold(node)
        self._store.tree.let_go(holder.node)
        holder.node = node
        holder.published = length

    def _publish_embeddings(self, holder: Holder) -> None:
        """Name embeddings by image content, all pages of an image once its prefill has begun."""
        for index, held in holder.own_groups() if self.publishes(holder) else ():
            group, position = self._store.groups[index], 0
            is_vision = group.kind is GroupKind.VISION
            for image in holder.facts.begun(holder.computed) if is_vision else ():
                end = position + image_pages(group, image)
                self._name_image(holder, index, held, image, range(position, end))
                held.published, position = max(held.published, end), end

    def _name_image(
        self, holder: Holder, index: int, held: GroupPages, image: ImageSpan, positions: range
    ) -> None:
        new = [at for at in positions if at >= max(held.first, held.published)]
        if not new:
            return
        tree, key = self._store.tree, self._store.rule.key(SPARE, 0, _image_rank(holder, image))
        content = holder.tokens[image.start : image.start + content_tokens(image)]
        node = tree.extend(tree.root(images_root(holder.root)), 0, content)
        for at in new:
            page = held.pages[at - held.first]
            if tree.put(node, index, (len(content), at - positions.start), page):
                self._store.pool.index(index, page, key)
                self._store.changes.on_named(holder.handle, index, page, len(content))

    def _publish_returned(self, holder: Holder, index: int, held: GroupPages) -> None:
        """Name pages that were copied back into holes of the index; other pages stay named."""
        size = self._store.groups[index].page_tokens
        for position in range(held.first, min(held.returned_to, held.published)):
            self._name(holder, index, ((position + 1) * size, 0), held.pages[position - held.first])
        held.returned_to = 0

    def _publish_whole(self, holder: Holder, index: int, held: GroupPages) -> None:
        group = self._store.groups[index]
        if group.kind is GroupKind.CROSS:
            places = list(image_places(group, holder.facts, holder.computed))
        elif group.kind.counts_tokens:
            count = holder.computed // group.page_tokens
            places = [((position + 1) * group.page_tokens, 0) for position in range(count)]
        else:
            return
        for position in range(max(held.first, held.published), len(places)):
            page = held.pages[position - held.first]
            self._name(holder, index, places[position], page)
        held.published = max(held.published, len(places))

    def _name(
        self, holder: Holder, index: int, place: Place, page: int, sort: Sort = Sort.FINE
    ) -> None:
        if self._store.tree.put(holder.node, index, place, page, sort):
            self._store.pool.index(
                index, page, self._store.rule.key(SPARE, 0, self._rank_length(index, place, holder))
            )
            self._store.changes.on_named(holder.handle, index, page, place[0])

    def _rank_length(self, index: int, place: Place, holder: Holder) -> int:
        """Return the eviction rank among pages of one age: longest prefix first, images whole."""
        if self._store.groups[index].kind in (GroupKind.CROSS, GroupKind.VISION):
            image = next(image for image in holder.facts.images if image.end == place[0])
            return _image_rank(holder, image)
        return place[0]

    def _publish_states(self, holder: Holder) -> None:
        """Name the states that the step has written, and release them."""
        for checkpoint in holder.checkpoints:
            if checkpoint.end > holder.computed:
                self._release_all(checkpoint.group, checkpoint.pages)
                continue
            if checkpoint.end > holder.published:
                self._extend(holder, checkpoint.end)
            waits = checkpoint.sort is Sort.WAYPOINT
            time = self._resuming.end_step(holder) if waits else self._store.step
            for part, page in enumerate(checkpoint.pages):
                place = (checkpoint.end, part)
                self._name(holder, checkpoint.group, place, page, checkpoint.sort)
                group, rank = checkpoint.group, checkpoint.rank
                key = self._key(holder, group, page, rank, time, checkpoint.end, place)
                self._store.pool.release(group, page, key)
            self.checkpoint_pages[checkpoint.group] += len(checkpoint.pages)
        holder.checkpoints.clear()

    def _release_all(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._store.pool.release(group, page, None)

    def leave_behind(self, holder: Holder) -> None:
        """Release pages before a window as spare, except those that are worth resuming from."""
        for index, held in holder.own_groups():
            start = kept_from(
                self._store.groups[index],
                self._store.policies[index],
                holder.facts,
                holder.computed,
            )
            count = min(start - held.first, len(held.pages))
            if count > 0:
                self.release(holder, index, held, held.pages[:count], SPARE)
                del held.pages[:count]
                held.first += count

    def _drop(self, holder: Holder) -> None:
        """Drop the pages beyond the budget, now that the prompt is computed."""
        for index, held in holder.own_groups():
            if dropped_tokens(self._store.groups[index], holder.facts):
                keep = kept_to(self._store.groups[index], holder.facts, holder.computed)
                self._release_all(index, held.pages[keep:])
                del held.pages[keep:]

    def release(
        self, holder: Holder, index: int, held: GroupPages, pages: Sequence[int], rank: int | None
    ) -> None:
        """Release the holder's pages from ``held.first`` on."""
        is_spare = rank == SPARE and bool(pages)
        ways = (
            self._resuming.places(holder, index, self._resuming.waypoints(holder))
            if is_spare
            else set()
        )
        worth = (
            self._resuming.places(holder, index, self._resuming.points(holder))
            if is_spare
            else set()
        )
        for position, page in enumerate(pages, start=held.first):
            place = self._place_of(holder, index, position)
            length, here = self._rank_length(index, place, holder), rank
            time = self._store.step
            if place in worth:
                here, time = NORMAL, self._resuming.end_step(holder)
            elif place in ways:
                here, time = NORMAL, self._resuming.waypoint_step(holder)
            key = None
            if here is not None:
                key = self._key(holder, index, page, here, time, length, place)
            self._store.pool.release(index, page, key)

    def _place_of(self, holder: Holder, index: int, position: int) -> Place:
        """Return the place at which the index would name the holder's page at a position."""
        group = self._store.groups[index]
        if group.kind is GroupKind.STATE:
            return holder.computed, position
        if group.kind.counts_tokens:
            return (position + 1) * group.page_tokens, 0
        for image in holder.facts.images:
            if position < image_pages(group, image):
                return image.end, position
            position -= image_pages(group, image)
        raise AssertionError("a page of no image")

    def let_sources_go(self, holder: Holder, *, renew: bool) -> None:
        """Release copy sources, whose copies are made or obsolete; ``renew`` counts an access."""
        for index, held in holder.own_groups():
            for place, page in held.sources.values():
                now = self._store.step
                key = self._key(holder, index, page, NORMAL, now, place[0], place, own=False)
                self._store.pool.release(index, page, key if renew else None)
            held.sources.clear()

    def note_used(self, holder: Holder) -> None:
        """Count the resume point of a new request as used, by its sort.

        Only a state or, without states, a window's partly filled page is counted: the sort of a
        whole page is unknown.
        """
        kinds = [self._store.groups[index].kind for index in holder.own]
        judged = {GroupKind.STATE} if GroupKind.STATE in kinds else WINDOWS
        for index, held in holder.own_groups():
            if self._store.groups[index].kind in judged and held.sources:
                page = held.sources[min(held.sources)][1]
                sort = Sort(self._store.tree.tag_of(index, page))
                if sort is not Sort.BRANCH:
                    self._store.usefulness.note_used(sort)
                    self._store.tree.retag(index, page, Sort.BRANCH)

    def publish_end(self, holder: Holder) -> None:
        """Name the state and partly filled pages that end with the last computed token."""
        if holder.computed > holder.published:
            self._extend(holder, holder.computed)
        for index, held in holder.own_groups():
            group, end = self._store.groups[index], holder.computed
            if group.kind is GroupKind.STATE:
                for part, page in enumerate(held.pages):
                    self._name(holder, index, (end, part), page, Sort.TURN_END)
            elif group.kind.counts_tokens and end % group.page_tokens:
                page = held.pages[end // group.page_tokens - held.first]
                self._name(holder, index, (end, 0), page, Sort.TURN_END)


def _image_rank(holder: Holder, image: ImageSpan) -> int:
    return int(holder.tokens[image.start]) * _SPREAD % _IMAGE_RANKS

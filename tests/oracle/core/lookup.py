"""The lookup of a prompt in the index, and the pages with which a request resumes."""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import WINDOWS, dropped_tokens, image_pages, resumed_from
from kvell.prefix.tokens import Tokens
from tests.oracle.index.hits import Found, image_places, longest_hit, resumes, tail_page, whole_run
from tests.oracle.index.radix import Node, Place
from tests.oracle.index.seen import content_tokens
from tests.oracle.placement.holders import GroupPages
from tests.oracle.placement.store import Store


def match(
    store: Store, tokens: Tokens, root: str, facts: Facts, own: Sequence[int]
) -> tuple[int, int, list[Found]]:
    """Return the hit's tokens, the indexed tokens, and per group the pages along them."""
    cached: list[Found] = [{} for _ in store.groups]
    path = list(store.tree.walk(root, tokens))
    for node, length in path:
        for group, pages in enumerate(node.pages):
            cached[group].update(
                {place: page for place, page in pages.items() if place[0] <= length}
            )
    matched = path[-1][1] if path else 0
    indexed = min(matched, len(tokens) - 1)
    if path:
        for index in own:
            _add_tails(store, index, path[-1][0], matched, cached[index])
    hit = longest_hit(
        [store.groups[index] for index in own],
        [store.policies[index] for index in own],
        [cached[index] for index in own],
        indexed,
        facts,
    )
    return hit, indexed, cached


def reach(
    store: Store, tokens: Tokens, root: str, facts: Facts, own: Sequence[int]
) -> dict[int, int]:
    """Return the length at which each group of a model would resume if it alone decided."""
    _, indexed, cached = match(store, tokens, root, facts, own)
    return {
        index: longest_hit(
            [store.groups[index]], [store.policies[index]], [cached[index]], indexed, facts
        )
        if store.policies[index].required_for_hit
        else max(0, indexed)
        for index in own
    }


def known(
    store: Store, tokens: Tokens, root: str, own: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Return all indexed pages of tokens and states along a text, in sorted rows: group, position,
    page, tokens of the prefix that the page ends."""
    rows = []
    for node, length in store.tree.walk(root, tokens):
        for index in own:
            group = store.groups[index]
            if not group.kind.counts_tokens and group.kind is not GroupKind.STATE:
                continue
            for (end, part), page in node.pages[index].items():
                position = part if group.kind is GroupKind.STATE else (end - 1) // group.page_tokens
                if end <= length:
                    rows.append((index, position, page, end))
    return sorted(rows)


def _add_tails(store: Store, index: int, node: Node, matched: int, cached: Found) -> None:
    """Add the pages after the indexed part of a prompt that share their first tokens with it."""
    group = store.groups[index]
    end = -(-matched // group.page_tokens) * group.page_tokens
    if not group.kind.counts_tokens or end == matched:
        return
    for below in store.tree.below(node, matched, end):
        for place, page in sorted(below.pages[index].items()):
            if matched < place[0] <= end:
                cached.setdefault(place, page)


def images_root(root: str) -> str:
    """Return the root under which embeddings are indexed by image content, independent of text."""
    return "\0" + root


def resume_embeddings(
    store: Store, index: int, tokens: Tokens, root: str, facts: Facts, length: int
) -> GroupPages:
    """Hold the embeddings of images after ``length``, up to the first image with a missing page."""
    group = store.groups[index]
    held = GroupPages(resumed_from(group, store.policies[index], facts, length), [])
    for image in (image for image in facts.images if image.start >= length):
        content = tokens[image.start : image.start + content_tokens(image)]
        path = list(store.tree.walk(images_root(root), content))
        if not path or path[-1][1] < len(content):
            break
        places = [(len(content), part) for part in range(image_pages(group, image))]
        pages = [store.tree.page_at(path[-1][0], index, place) for place in places]
        if None in pages:
            break
        held.pages.extend(page for page in pages if page is not None)
    for page in held.pages:
        store.pool.acquire(index, page)
    held.published = held.end
    return held


def resume(store: Store, index: int, facts: Facts, length: int, cached: Found) -> GroupPages:
    """Hold a group's pages for a request that resumes at ``length``.

    Whole pages that do not change are shared.  States, partly filled pages, and pages from which
    tokens will be dropped are copied when the request gets pages.
    """
    group, policy = store.groups[index], store.policies[index]
    held = GroupPages(resumed_from(group, policy, facts, length), [])
    if group.kind is GroupKind.STATE:
        if length and resumes(group, policy, cached, length, facts):
            _copy(store, index, held, [(length, part) for part in range(group.slices)], cached)
    elif group.kind is GroupKind.CROSS:
        if resumes(group, policy, cached, length, facts):
            held.pages = [cached[place] for place in image_places(group, facts, length)]
    else:
        _resume_tokens(store, index, held, facts, length, cached)
    for page in held.pages:
        store.pool.acquire(index, page)
    held.published = held.end
    return held


def _resume_tokens(
    store: Store, index: int, held: GroupPages, facts: Facts, length: int, cached: Found
) -> None:
    group = store.groups[index]
    size = group.page_tokens
    if not resumes(group, store.policies[index], cached, length, facts):
        run = 0 if group.kind in WINDOWS else whole_run(group, cached, length)
        held.pages = [cached[(position + 1) * size, 0] for position in range(run)]
        return
    places = [((position + 1) * size, 0) for position in range(held.first, length // size)]
    if dropped_tokens(group, facts):
        _copy(store, index, held, places, cached)
    else:
        held.pages = [cached[place] for place in places]
    if length % size:
        page = tail_page(group, cached, length)
        if page is None:
            raise AssertionError("a hit inside a page has a page to copy")
        store.pool.acquire(index, page)
        held.sources[length // size] = ((length, 0), page)


def _copy(
    store: Store, index: int, held: GroupPages, places: Sequence[Place], cached: Found
) -> None:
    for position, place in enumerate(places, start=held.first):
        store.pool.acquire(index, cached[place])
        held.sources[position] = (place, cached[place])

"""Finding a prompt in the index, and what a request that resumes there starts with."""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import WINDOWS, dropped_tokens, image_pages, resumed_from
from kvell.prefix.index.hits import Found, image_places, longest_hit, resumes, tail_page, whole_run
from kvell.prefix.index.radix import Node, Place, Tokens
from kvell.prefix.placement.holders import GroupPages
from kvell.prefix.placement.store import Store


def match(
    store: Store, tokens: Tokens, root: str, facts: Facts, own: Sequence[int]
) -> tuple[int, int, list[Found]]:
    """Tokens that can be resumed, tokens that are known, and per group the pages along them."""
    found: list[Found] = [{} for _ in store.groups]
    path = list(store.tree.walk(root, tokens))
    for node, length in path:
        for group, pages in enumerate(node.pages):
            found[group].update(
                {place: page for place, page in pages.items() if place[0] <= length}
            )
    matched = path[-1][1] if path else 0
    known = min(matched, len(tokens) - 1)
    if path:
        for index in own:
            _add_tails(store, index, path[-1][0], matched, found[index])
    hit = longest_hit(
        [store.groups[index] for index in own],
        [store.policies[index] for index in own],
        [found[index] for index in own],
        known,
        facts,
    )
    return hit, known, found


def reach(
    store: Store, tokens: Tokens, root: str, facts: Facts, own: Sequence[int]
) -> dict[int, int]:
    """At which length each group of a model would resume if it alone decided."""
    _, known, found = match(store, tokens, root, facts, own)
    return {
        index: longest_hit(
            [store.groups[index]], [store.policies[index]], [found[index]], known, facts
        )
        if store.policies[index].required_for_hit
        else max(0, known)
        for index in own
    }


def known(
    store: Store, tokens: Tokens, root: str, own: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """All pages of tokens and states that the index names along a text, sorted:
    (group, position, page, tokens of the prefix that it ends)."""
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


def _add_tails(store: Store, index: int, node: Node, matched: int, found: Found) -> None:
    """Pages of which a prompt shares the first tokens, where it parts from what is known."""
    group = store.groups[index]
    end = -(-matched // group.page_tokens) * group.page_tokens
    if not group.kind.counts_tokens or end == matched:
        return
    for below in store.tree.below(node, matched, end):
        for place, page in sorted(below.pages[index].items()):
            if matched < place[0] <= end:
                found.setdefault(place, page)


def images_root(root: str) -> str:
    """Where embeddings are known by their images' content, whatever the text before it."""
    return "\0" + root


def resume_embeddings(
    store: Store, index: int, tokens: Tokens, root: str, facts: Facts, length: int
) -> GroupPages:
    """Hold the embeddings of the images after ``length``, up to the first of which a page is
    missing."""
    group = store.groups[index]
    held = GroupPages(resumed_from(group, store.policies[index], facts, length), [])
    for image in (image for image in facts.images if image.start >= length):
        content = tokens[image.start : image.start + image.content_tokens]
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


def resume(store: Store, index: int, facts: Facts, length: int, found: Found) -> GroupPages:
    """Hold what a request that resumes at ``length`` starts with in a group.

    Pages that are whole and stay as they are, are shared.  A state, a page that the prefix
    fills in part, and pages that will be dropped from, are copied when pages are given.
    """
    group, policy = store.groups[index], store.policies[index]
    held = GroupPages(resumed_from(group, policy, facts, length), [])
    if group.kind is GroupKind.STATE:
        if length and resumes(group, policy, found, length, facts):
            _copy(store, index, held, [(length, part) for part in range(group.slices)], found)
    elif group.kind is GroupKind.CROSS:
        if resumes(group, policy, found, length, facts):
            held.pages = [found[place] for place in image_places(group, facts, length)]
    else:
        _resume_tokens(store, index, held, facts, length, found)
    for page in held.pages:
        store.pool.acquire(index, page)
    held.published = held.end
    return held


def _resume_tokens(
    store: Store, index: int, held: GroupPages, facts: Facts, length: int, found: Found
) -> None:
    group = store.groups[index]
    size = group.page_tokens
    if not resumes(group, store.policies[index], found, length, facts):
        run = 0 if group.kind in WINDOWS else whole_run(group, found, length)
        held.pages = [found[(position + 1) * size, 0] for position in range(run)]
        return
    places = [((position + 1) * size, 0) for position in range(held.first, length // size)]
    if dropped_tokens(group, facts):
        _copy(store, index, held, places, found)
    else:
        held.pages = [found[place] for place in places]
    if length % size:
        page = tail_page(group, found, length)
        if page is None:
            raise AssertionError("a hit inside a page has a page to copy")
        store.pool.acquire(index, page)
        held.sources[length // size] = ((length, 0), page)


def _copy(
    store: Store, index: int, held: GroupPages, places: Sequence[Place], found: Found
) -> None:
    for position, place in enumerate(places, start=held.first):
        store.pool.acquire(index, found[place])
        held.sources[position] = (place, found[place])

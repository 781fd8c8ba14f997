"""A compressed radix tree over tokens; each node has the pages of every group.

A node holds the tokens ``start … end-1`` of every prefix through it, as one int32
array.  A page has a place, ``(end, part)``.  ``end`` is the length of the prefix that ends
with the page's last token (of a state: the tokens that it represents; of an image: the end of
the image).  ``part`` distinguishes pages with the same end (slices of a state, pages of an image;
otherwise 0).  A page belongs to the node that holds its last token, so when an edge is split, a
page that straddles the cut stays with the old branch, and the new branch gets its own.  Holes
are allowed: a node exists while a page, a child or a holder needs it.

Source: SGLang's RadixAttention, and Jenga §5 for the pages of groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvell.prefix.tokens import Tokens, common_prefix

Place = tuple[int, int]
"""The (end, part) of a page on its path."""

BELOW_NODES = 8
"""The number of nodes searched for a page of which a prompt shares only the first tokens."""


@dataclass(eq=False)
class Node:
    """The tokens ``start … start+len(tokens)-1`` of the prefixes through this node."""

    tokens: Tokens
    start: int
    parent: "Node | None"
    pages: list[dict[Place, int]]
    children: dict[int, "Node"] = field(default_factory=dict)
    holders: int = 0
    root: str = ""

    @property
    def end(self) -> int:
        """The length of the prefix that ends with this node."""
        return self.start + len(self.tokens)


class RadixTree:
    """One tree per root name (model, adapter, salt), and the place of every named page."""

    def __init__(self, num_groups: int) -> None:
        self._roots: dict[str, Node] = {}
        self._where: list[dict[int, tuple[Node, Place]]] = [{} for _ in range(num_groups)]
        self._tags: dict[tuple[int, int], int] = {}

    def add_groups(self, count: int) -> None:
        self._where.extend({} for _ in range(count))
        for node in self.nodes():
            node.pages.extend({} for _ in range(count))

    def root(self, name: str) -> Node:
        """Return the root of a name, and create it if needed."""
        if name not in self._roots:
            self._roots[name] = self._node(np.empty(0, np.int32), 0, None)
            self._roots[name].root = name
        return self._roots[name]

    def walk(self, root: str, tokens: Tokens) -> Iterator[tuple[Node, int]]:
        """Yield the nodes along ``tokens``, each with the prefix length matched up to its end."""
        node, length = self._roots.get(root), 0
        while node is not None and length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                return
            length += common_prefix(child.tokens, tokens[length:])
            yield child, length
            if length < child.end:
                return
            node = child

    def extend(self, node: Node, length: int, tokens: Tokens) -> Node:
        """Insert ``tokens`` below a matched prefix and return the node in which they end.

        The first ``length`` tokens are in the tree already, on the path to ``node``.  The node may
        have been split since the caller got it, but never merged.
        """
        node = self.at(node, length)
        while length < len(tokens):
            if length < node.end:
                shared = common_prefix(node.tokens[length - node.start :], tokens[length:])
                length += shared
                if length < len(tokens) and length < node.end:
                    node = self._split(node, length)
                continue
            child = node.children.get(int(tokens[length]))
            if child is None:
                return self._grow(node, length, tokens)
            node = child
        return self.at(node, length)

    def at(self, node: Node, length: int) -> Node:
        """Return the node on the path to ``node`` that holds token ``length-1``."""
        while node.parent is not None and length <= node.start:
            node = node.parent
        return node

    def put(self, node: Node, group: int, place: Place, page: int, tag: int = 0) -> bool:
        """Name a page at a place on the path to ``node``, or return False if the place is taken.

        :param tag: a number that :meth:`tag_of` returns while the page is named.
        """
        home = self.at(node, place[0])
        if place in home.pages[group]:
            return False
        home.pages[group][place] = page
        self._where[group][page] = (home, place)
        self._tags[group, page] = tag
        return True

    def retag(self, group: int, page: int, tag: int) -> None:
        """Replace the tag of a page, unless the tag is 0."""
        if self._tags.get((group, page)):
            self._tags[group, page] = tag

    def part_of(self, group: int, page: int) -> int:
        return self._where[group][page][1][1]

    def tag_of(self, group: int, page: int) -> int:
        """Return the tag of a page, or 0 if it is not named."""
        return self._tags.get((group, page), 0)

    def drop(self, group: int, page: int) -> None:
        """Remove the name of a page, and the nodes that are no longer needed."""
        node, place = self._where[group].pop(page)
        del node.pages[group][place]
        del self._tags[group, page]
        self.prune(node)

    def page_at(self, node: Node, group: int, place: Place) -> int | None:
        """Return the page at a place on the path to ``node``, or None in a hole."""
        return self.at(node, place[0]).pages[group].get(place)

    def end_of(self, group: int, page: int) -> int | None:
        """Return the length of the prefix that a page ends, or None if the page has no name."""
        location = self._where[group].get(page)
        return None if location is None else location[1][0]

    def rename(self, group: int, old: int, new: int) -> None:
        node, place = self._where[group].pop(old)
        node.pages[group][place] = new
        self._where[group][new] = (node, place)
        self._tags[group, new] = self._tags.pop((group, old))

    def below(self, node: Node, length: int, end: int) -> Iterator[Node]:
        """Yield the first ``BELOW_NODES`` nodes with tokens between prefix lengths ``length`` and
        ``end``.

        The search starts from ``node``, which holds token ``length-1`` or ends before it.
        """
        stack, seen = [node], 0
        while stack and seen < BELOW_NODES:
            here = stack.pop()
            if here.end > length:
                seen += 1
                yield here
            if here.end < end:
                stack.extend(child for _, child in sorted(here.children.items(), reverse=True))

    def hold(self, node: Node) -> None:
        node.holders += 1

    def let_go(self, node: Node) -> None:
        """Drop one holder's reference, and the nodes that are no longer needed."""
        node.holders -= 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Remove the node and its ancestors, root included, as far as they are not needed."""
        while node.parent is not None and not self._needed(node):
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            node.parent = None
            node = parent
        if node.parent is None and not self._needed(node):
            del self._roots[node.root]

    def named_pages(self) -> Iterator[tuple[int, int, Node, Place]]:
        """Yield (group, page, node, place) for every page that the tree names."""
        for group, where in enumerate(self._where):
            for page, (node, place) in where.items():
                yield group, page, node, place

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _needed(self, node: Node) -> bool:
        return bool(node.holders or node.children or any(node.pages))

    def _node(self, tokens: Tokens, start: int, parent: Node | None) -> Node:
        return Node(tokens, start, parent, [{} for _ in self._where])

    def _grow(self, node: Node, length: int, tokens: Tokens) -> Node:
        rest = tokens[length:].copy()
        if node.parent is not None and not node.children:
            node.tokens = np.concatenate([node.tokens, rest])
            return node
        child = self._node(rest, length, node)
        node.children[int(rest[0])] = child
        return child

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after prefix ``length`` and return the new upper node."""
        parent, cut = node.parent, length - node.start
        if parent is None:
            raise AssertionError("a root has no tokens to cut")
        upper = self._node(node.tokens[:cut].copy(), node.start, parent)
        parent.children[int(upper.tokens[0])] = upper
        node.tokens = node.tokens[cut:].copy()
        node.start = length
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        for group, pages in enumerate(node.pages):
            for place in [place for place in pages if place[0] <= length]:
                page = pages.pop(place)
                upper.pages[group][place] = page
                self._where[group][page] = (upper, place)
        return upper

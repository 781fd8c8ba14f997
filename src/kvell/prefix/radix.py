"""A compressed radix tree over tokens; beside each node, the pages of every group.

A node holds the tokens ``start … end-1`` of every prefix through it, as one int32
array.  A page belongs to the node that holds its *last* token, so when an edge is
split, a page that straddles the cut stays with the old branch, and the new branch
gets its own.  Holes are allowed: a node lives while a page, a child or a holder
needs it.

Source: SGLang's RadixAttention, and Jenga §5 for what is kept beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


@dataclass(eq=False)
class Node:
    """Tokens ``start … start+len(tokens)-1`` of the prefixes that run through it."""

    tokens: Tokens
    start: int
    parent: "Node | None"
    pages: list[dict[int, int]]
    children: dict[int, "Node"] = field(default_factory=dict)
    holders: int = 0
    root: str = ""

    @property
    def end(self) -> int:
        """Length of the prefix that ends with this node."""
        return self.start + len(self.tokens)


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Number of leading tokens that two arrays share."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


class RadixTree:
    """One tree per root name (model, adapter, salt); shared bookkeeping of pages."""

    def __init__(self, page_tokens: tuple[int, ...]) -> None:
        self.page_tokens = page_tokens
        self._roots: dict[str, Node] = {}
        self._where: list[dict[int, tuple[Node, int]]] = [{} for _ in page_tokens]

    def root(self, name: str) -> Node:
        """The root of a name, made when first asked for."""
        if name not in self._roots:
            self._roots[name] = self._node(np.empty(0, np.int32), 0, None)
            self._roots[name].root = name
        return self._roots[name]

    def walk(self, root: str, tokens: Tokens) -> Iterator[tuple[Node, int]]:
        """Nodes along ``tokens``, each with the length of prefix matched once it is done."""
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

    def page_at(self, node: Node, group: int, position: int) -> int | None:
        """The page of ``group`` at a page position, on the path that ends in ``node``."""
        last_token = (position + 1) * self.page_tokens[group] - 1
        here: Node | None = node
        while here is not None and last_token < here.start:
            here = here.parent
        return here.pages[group].get(position) if here is not None else None

    def extend(self, node: Node, length: int, tokens: Tokens) -> Node:
        """Put ``tokens`` into the tree below a known prefix; returns the node they end in.

        ``node`` and ``length`` say how much of ``tokens`` is in the tree already; the
        node may have been split since it was remembered, never merged.
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
        """The node on the path to ``node`` that holds token ``length-1``."""
        while node.parent is not None and length <= node.start:
            node = node.parent
        return node

    def put(self, node: Node, group: int, position: int, page: int) -> bool:
        """Name a page at a position of the path ending in ``node``, unless one is there."""
        last_token = (position + 1) * self.page_tokens[group] - 1
        home = self.at(node, last_token + 1)
        if position in home.pages[group]:
            return False
        home.pages[group][position] = page
        self._where[group][page] = (home, position)
        return True

    def drop(self, group: int, page: int) -> None:
        """The page is named no longer; nodes that nothing needs any more go with it."""
        node, position = self._where[group].pop(page)
        del node.pages[group][position]
        self.prune(node)

    def hold(self, node: Node) -> None:
        """Keep a node alive for one holder."""
        node.holders += 1

    def let_go(self, node: Node) -> None:
        """One holder less."""
        node.holders -= 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Remove the node and its ancestors as far as nothing needs them, root included."""
        while node.parent is not None and not self._needed(node):
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            node.parent = None
            node = parent
        if node.parent is None and not self._needed(node):
            del self._roots[node.root]

    def named(self) -> Iterator[tuple[int, int, Node, int]]:
        """Every (group, page, node, position) that the tree names."""
        for group, where in enumerate(self._where):
            for page, (node, position) in where.items():
                yield group, page, node, position

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _needed(self, node: Node) -> bool:
        return bool(node.holders or node.children or any(node.pages))

    def _node(self, tokens: Tokens, start: int, parent: Node | None) -> Node:
        return Node(tokens, start, parent, [{} for _ in self.page_tokens])

    def _grow(self, node: Node, length: int, tokens: Tokens) -> Node:
        rest = tokens[length:].copy()
        if node.parent is not None and not node.children:
            node.tokens = np.concatenate([node.tokens, rest])
            return node
        child = self._node(rest, length, node)
        node.children[int(rest[0])] = child
        return child

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after prefix ``length``; it keeps the lower part. Returns the upper."""
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
            size = self.page_tokens[group]
            for position in [p for p in pages if (p + 1) * size <= length]:
                page = pages.pop(position)
                upper.pages[group][position] = page
                self._where[group][page] = (upper, position)
        return upper

"""The token tree: matching, splitting, and which branch keeps a page."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.prefix.tokens import common_prefix
from tests.oracle.index.radix import Node, RadixTree
from tests.prefix.story import ints

texts = st.lists(st.integers(0, 2), max_size=14)


def insert(tree: RadixTree, tokens: list[int], root: str = "") -> Node:
    """Tokens from the root, held so that they stay."""
    node = tree.extend(tree.root(root), 0, ints(tokens))
    tree.hold(node)
    return node


def matched(tree: RadixTree, tokens: list[int], root: str = "") -> int:
    return max((length for _, length in tree.walk(root, ints(tokens))), default=0)


def path_of(node: Node) -> list[int]:
    tokens: list[int] = []
    here: Node | None = node
    while here is not None:
        tokens = [*here.tokens.tolist(), *tokens]
        here = here.parent
    return tokens


@given(texts, texts)
def test_the_common_prefix_is_the_longest_equal_beginning(
    left: list[int], right: list[int]
) -> None:
    size = common_prefix(ints(left), ints(right))
    assert left[:size] == right[:size]
    assert size == min(len(left), len(right)) or left[size] != right[size]


@given(st.lists(texts.filter(bool), min_size=1, max_size=8), texts)
def test_matching_finds_the_longest_beginning_any_text_has(
    stored: list[list[int]], asked: list[int]
) -> None:
    tree = RadixTree(1)
    for tokens in stored:
        insert(tree, tokens)
    best = max(common_prefix(ints(tokens), ints(asked)) for tokens in stored)
    assert matched(tree, asked) == best


@given(st.lists(texts.filter(bool), min_size=1, max_size=8))
def test_every_node_is_filed_under_its_first_token_and_follows_its_parent(
    stored: list[list[int]],
) -> None:
    tree = RadixTree(1)
    ends = [insert(tree, tokens) for tokens in stored]
    for node in tree.nodes():
        for first, child in node.children.items():
            assert int(child.tokens[0]) == first
            assert child.parent is node
            assert child.start == node.end
    for tokens, node in zip(stored, ends, strict=True):
        assert path_of(tree.at(node, len(tokens)))[: len(tokens)] == tokens


@given(st.lists(texts.filter(bool), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_letting_everything_go_leaves_no_node(stored: list[list[int]], random: Random) -> None:
    tree = RadixTree(1)
    ends = [insert(tree, tokens) for tokens in stored]
    random.shuffle(ends)
    for node in ends:
        tree.let_go(node)
    assert list(tree.nodes()) == []


def test_a_leaf_grows_in_place_and_a_branch_gets_a_child() -> None:
    tree = RadixTree(1)
    first = insert(tree, [1, 2, 3])
    assert tree.extend(first, 3, ints([1, 2, 3, 4])) is first
    insert(tree, [1, 2, 9])
    assert sorted((n.start, n.end) for n in tree.nodes()) == [(0, 0), (0, 2), (2, 3), (2, 4)]


def page_at(node: Node, group: int, end: int, part: int = 0) -> int | None:
    """What the path to a node names at a place."""
    here: Node | None = node
    while here is not None:
        if (end, part) in here.pages[group]:
            return here.pages[group][end, part]
        here = here.parent
    return None


def test_a_page_that_straddles_a_split_stays_with_the_old_branch() -> None:
    """Pages of 4 tokens; the branch point at 6 cuts page 1 (tokens 4 … 7)."""
    tree = RadixTree(1)
    old = insert(tree, [0, 1, 2, 3, 4, 5, 6, 7])
    assert tree.put(old, 0, (4, 0), 50)
    assert tree.put(old, 0, (8, 0), 51)
    new = insert(tree, [0, 1, 2, 3, 4, 5, 8, 9])
    assert page_at(new, 0, 4) == 50
    assert page_at(new, 0, 8) is None
    assert tree.put(new, 0, (8, 0), 61), "the new branch gets its own"
    assert page_at(old, 0, 8) == 51
    assert {(page, node.start, place) for _, page, node, place in tree.named_pages()} == {
        (50, 0, (4, 0)),
        (51, 6, (8, 0)),
        (61, 6, (8, 0)),
    }


def test_a_page_that_ends_at_the_split_goes_with_what_both_branches_share() -> None:
    """As a request that ended there left it: half full."""
    tree = RadixTree(1)
    old = insert(tree, [0, 1, 2, 3, 4, 5, 6, 7])
    tree.put(old, 0, (6, 0), 50)
    tree.put(old, 0, (7, 0), 51)
    new = insert(tree, [0, 1, 2, 3, 4, 5, 8, 9])
    assert (page_at(new, 0, 6), page_at(new, 0, 7)) == (50, None)


def test_groups_with_other_page_sizes_straddle_on_their_own() -> None:
    tree = RadixTree(2)
    old = insert(tree, list(range(8)))
    for position in range(4):
        tree.put(old, 0, (2 * position + 2, 0), 10 + position)
    tree.put(old, 1, (4, 0), 20)
    tree.put(old, 1, (8, 0), 21)
    new = insert(tree, [0, 1, 2, 3, 4, 5, 90])
    assert [page_at(new, 0, end) for end in (2, 4, 6, 8)] == [10, 11, 12, None]
    assert [page_at(new, 1, end) for end in (4, 8)] == [20, None]


def test_a_place_is_named_once() -> None:
    tree = RadixTree(1)
    node = insert(tree, [1, 2, 3, 4])
    assert tree.put(node, 0, (4, 0), 7)
    assert not tree.put(node, 0, (4, 0), 8)
    assert tree.put(node, 0, (4, 1), 9), "another slice of the same state"
    assert (page_at(node, 0, 4), page_at(node, 0, 4, 1)) == (7, 9)


def test_slices_of_one_state_are_split_off_together() -> None:
    tree = RadixTree(1)
    old = insert(tree, [1, 2, 3, 4, 5])
    for part in range(3):
        tree.put(old, 0, (2, part), 7 + part)
    upper = insert(tree, [1, 2, 9]).parent
    assert upper is not None
    assert upper.pages == [{(2, 0): 7, (2, 1): 8, (2, 2): 9}]
    tree.drop(0, 8)
    assert upper.pages == [{(2, 0): 7, (2, 2): 9}]


def test_groups_that_come_later_name_pages_in_nodes_that_were_there() -> None:
    tree = RadixTree(1)
    node = insert(tree, [1, 2, 3])
    tree.add_groups(2)
    assert tree.put(node, 2, (3, 0), 5)
    assert list(tree.named_pages()) == [(2, 5, node, (3, 0))]
    assert insert(tree, [1, 7]).pages == [{}, {}, {}]


def test_a_node_lives_while_a_page_is_under_it_and_goes_with_the_last() -> None:
    tree = RadixTree(1)
    node = insert(tree, [1, 2, 3, 4])
    tree.put(node, 0, (2, 0), 7)
    tree.put(node, 0, (4, 0), 8)
    tree.let_go(node)
    tree.drop(0, 7)
    assert matched(tree, [1, 2, 3, 4]) == 4, "holes are allowed"
    tree.drop(0, 8)
    assert list(tree.nodes()) == []


def test_a_remembered_node_finds_its_part_after_splits() -> None:
    tree = RadixTree(1)
    old = insert(tree, [1, 2, 3, 4, 5, 6])
    insert(tree, [1, 2, 9])
    insert(tree, [1, 2, 3, 4, 9])
    assert [(n.start, n.end) for n in (tree.at(old, 2), tree.at(old, 4), tree.at(old, 6))] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]


def test_roots_share_nothing_and_asking_makes_none() -> None:
    tree = RadixTree(1)
    insert(tree, [1, 2], root="left")
    assert matched(tree, [1, 2], root="left") == 2
    assert matched(tree, [1, 2], root="right") == 0
    assert [n.root for n in tree.nodes() if n.parent is None] == ["left"]


def test_tokens_are_the_trees_own() -> None:
    tree = RadixTree(1)
    tokens = ints([1, 2, 3])
    tree.hold(tree.extend(tree.root(""), 0, tokens))
    tokens[:] = 9
    assert matched(tree, [1, 2, 3]) == 3


def test_nodes_hold_contiguous_int32() -> None:
    tree = RadixTree(1)
    insert(tree, [1, 2, 3])
    insert(tree, [1, 5])
    for node in tree.nodes():
        assert node.tokens.dtype == np.int32
        assert node.tokens.flags["C_CONTIGUOUS"]

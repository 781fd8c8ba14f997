"""A memo of hashes answers what would be computed, whatever was asked before."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.trees import chains as memos
from kvell.cluster.trees.chains import SEGMENT_BLOCKS, HashMemo, PromptChain
from kvell.engine.requests.block_hashes import BlockHashes
from kvell.memory import Tokens
from tests.cluster.trees.naive_trees import FULL

SEGMENT_TOKENS = SEGMENT_BLOCKS * 2


def segments_of(memo: HashMemo) -> dict[Any, Any]:
    return memo._segments


def text(*parts: tuple[int, int]) -> Tokens:
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


parts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, SEGMENT_TOKENS)), min_size=1, max_size=4
)
asked = st.lists(
    st.tuples(
        parts, st.sampled_from([1, 2, 3]), st.sampled_from(["", "m"]), st.sampled_from(["", "m"])
    ),
    max_size=8,
)


@given(asked, st.integers(1, 6))
def test_it_changes_nothing(
    questions: list[tuple[list[tuple[int, int]], int, str, str]], most: int
) -> None:
    memo = HashMemo(most)
    for shape, size, model, root in questions:
        tokens = text(*shape)
        assert memo.hashes(tokens, size, model, root) == BlockHashes(size, model, root).all_of(
            tokens
        )
        assert len(memo) <= most


@pytest.mark.parametrize(
    ("second", "hashed"),
    [
        (text((1, SEGMENT_TOKENS), (2, SEGMENT_TOKENS), (3, 8)), 4),
        (text((1, SEGMENT_TOKENS), (3, SEGMENT_TOKENS)), SEGMENT_BLOCKS),
        (text((3, SEGMENT_TOKENS), (2, SEGMENT_TOKENS)), 2 * SEGMENT_BLOCKS),
    ],
    ids=["longer", "branches", "begins otherwise"],
)
def test_what_is_known_is_not_hashed_again(
    second: Tokens, hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    class Counting(BlockHashes):
        def all_of(self, tokens: Tokens) -> list[int]:
            known = len(self._hashes)
            hashes = super().all_of(tokens)
            computed.append(len(hashes) - known)
            return hashes

    monkeypatch.setattr(memos, "BlockHashes", Counting)
    memo = HashMemo()
    memo.hashes(text((1, SEGMENT_TOKENS), (2, SEGMENT_TOKENS)), 2, "", "")
    memo.hashes(second, 2, "", "")
    assert computed == [2 * SEGMENT_BLOCKS, hashed]


def test_segments_that_are_asked_for_stay() -> None:
    memo = HashMemo(2)
    for value in (1, 2, 1, 3):
        memo.hashes(text((value, SEGMENT_TOKENS)), 2, "", "")
    assert len(memo) == 2
    kept = dict(segments_of(memo))
    memo.hashes(text((1, SEGMENT_TOKENS)), 2, "", "")
    assert dict(segments_of(memo)) == kept


def test_a_segment_whose_beginning_was_forgotten_is_not_taken_for_another() -> None:
    memo, tokens = HashMemo(1), text((1, SEGMENT_TOKENS), (2, SEGMENT_TOKENS))
    for _ in range(2):
        assert memo.hashes(tokens, 2, "", "") == BlockHashes(2, "", "").all_of(tokens)
        assert len(memo) == 1


def test_chains_are_the_same_with_one() -> None:
    memo, tokens = HashMemo(), text((5, 700))
    for _ in range(2):
        chain = PromptChain.of(tokens, [FULL], "", "salt", memo)
        assert chain == PromptChain.of(tokens, [FULL], "", "salt")
    assert len(memo) == 700 // 4 // SEGMENT_BLOCKS

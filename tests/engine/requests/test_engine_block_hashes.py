"""Hashes of blocks, which others keep and compare: they may never change."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.notices import NO_BLOCK
from kvell.engine.requests.block_hashes import BlockHashes

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)


def plainly(ids: list[int], size: int, model: str, root: str) -> list[int]:
    """One block after the other, as they have been named from the first version on."""
    hashes: list[int] = []
    for start in range(0, len(ids) // size * size, size):
        parent = hashes[-1] if hashes else NO_BLOCK
        content = parent.to_bytes(8, "little")
        content += b"".join(one.to_bytes(4, "little", signed=True) for one in ids[start:][:size])
        of = f"{len(model)}:{model}{root}".encode()
        key = b"" if hashes else hashlib.blake2b(of, digest_size=32).digest()
        digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
        hashes.append(int.from_bytes(digest, "little") or 1)
    return hashes


@given(tokens, st.integers(1, 20), st.sampled_from(["", "m"]), st.sampled_from(["", "root"]))
def test_they_are_what_they_always_were(ids: list[int], size: int, model: str, root: str) -> None:
    found = BlockHashes(size, model, root).all_of(np.asarray(ids, np.int32))
    assert found == plainly(ids, size, model, root)


@given(tokens, st.integers(1, 20), st.lists(st.integers(0, 60), max_size=4))
def test_a_text_may_grow_between_questions(ids: list[int], size: int, cuts: list[int]) -> None:
    chain, array = BlockHashes(size, "", ""), np.asarray(ids, np.int32)
    hashes = plainly(ids, size, "", "")
    for cut in cuts:
        blocks = min(cut, len(ids)) // size
        assert chain.up_to(array[: blocks * size]) == (hashes[blocks - 1] if blocks else NO_BLOCK)
        assert chain.all_of(array[: min(cut, len(ids))]) == hashes[:blocks]
    assert chain.all_of(array) == hashes


@pytest.mark.parametrize("ids", [[], [1, 2, 3]])
def test_a_block_that_is_not_full_has_no_hash(ids: list[int]) -> None:
    assert BlockHashes(4, "", "").all_of(np.asarray(ids, np.int32)) == []


def test_one_that_others_may_have_kept() -> None:
    (found,) = BlockHashes(4, "", "").all_of(np.arange(4, dtype=np.int32))
    assert found == 8559916909778575126

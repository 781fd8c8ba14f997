"""Pages of a peer on this host, read out of its memory."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvell.mempool.transports.mapped import BATCH_PIECES, MappedPages
from kvell.mempool.transports.page_copies import Bytes, Piece
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.source import RIGHT_GONE, STOPPED
from kvell.wire.frames import ProtocolError

POOL_BYTES = 1 << 20
GRANTED = 7
CONTENT: Bytes = np.random.default_rng(2).integers(0, 256, POOL_BYTES, np.uint8)


@pytest.fixture
def rights() -> Iterator[Rights]:
    one = Rights()
    one.grant(GRANTED, "puller", [(0, POOL_BYTES)])
    yield one
    one.close()


def descriptors(rights: Rights, pool_bytes: int = POOL_BYTES) -> list[int]:
    pool = os.memfd_create("kvell-test")
    os.write(pool, CONTENT[:pool_bytes].tobytes())
    return [pool, os.dup(rights.descriptor)]


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


def bring(
    pages: MappedPages, pieces: list[Piece], number: int = GRANTED, is_stopped: bool = False
) -> tuple[str, Bytes]:
    target, stop = np.zeros(POOL_BYTES, np.uint8), threading.Event()
    if is_stopped:
        stop.set()
    return pages.bring(number, pieces, target, stop), target


def test_what_comes_is_what_is_there_and_nothing_stays_open(rights: Rights) -> None:
    given = descriptors(rights)
    pages = MappedPages(POOL_BYTES, given)
    assert [is_open(one) for one in given] == [True, False], "the pool may be mapped once more"
    pieces = [Piece(i * 4096, POOL_BYTES - (i + 1) * 4096, 100) for i in range(3 * BATCH_PIECES)]
    problem, target = bring(pages, pieces)
    assert problem == ""
    expected = np.zeros(POOL_BYTES, np.uint8)
    for one in pieces:
        expected[one.target : one.target + 100] = CONTENT[one.source : one.source + 100]
    assert (target == expected).all()
    pages.close()
    assert not any(is_open(one) for one in given)


def test_a_right_that_is_gone_is_seen_after_the_copy(rights: Rights) -> None:
    pages = MappedPages(POOL_BYTES, descriptors(rights))
    assert bring(pages, [Piece(0, 0, 10)], GRANTED + 1)[0] == RIGHT_GONE
    rights.revoke(GRANTED)
    assert not rights.stands(GRANTED)
    problem, target = bring(pages, [Piece(0, 0, 10)])
    assert problem == RIGHT_GONE
    assert (target[:10] == CONTENT[:10]).all()


@pytest.mark.parametrize("piece", [Piece(POOL_BYTES - 9, 0, 10), Piece(-1, 0, 10)])
def test_nothing_beyond_the_memory_is_read(rights: Rights, piece: Piece) -> None:
    pages = MappedPages(POOL_BYTES, descriptors(rights))
    problem, target = bring(pages, [Piece(0, 0, 10), piece])
    assert "beyond the sender's memory" in problem
    assert not target.any()


def test_a_pull_that_was_stopped_copies_nothing(rights: Rights) -> None:
    pages = MappedPages(POOL_BYTES, descriptors(rights))
    problem, target = bring(pages, [Piece(0, 0, 10)], is_stopped=True)
    assert problem == STOPPED and not target.any()


def test_memory_that_is_not_what_it_should_be_is_refused(rights: Rights) -> None:
    small = descriptors(rights, POOL_BYTES // 2)
    with pytest.raises(ProtocolError, match="smaller than it says"):
        MappedPages(POOL_BYTES, small)
    pool, table = descriptors(rights)
    os.close(table)
    reader, writer = os.pipe()
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        MappedPages(POOL_BYTES, [pool, reader])
    os.close(writer)
    assert not any(is_open(one) for one in (*small, pool, reader))

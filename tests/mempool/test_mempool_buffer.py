"""Host memory behind a pool: swaps, matches of any medium, and texts that travel from there."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvell.errors import ChangeSomething, TryLater
from kvell.memory import audit
from kvell.mempool.buffer import HostBuffer, Lease
from kvell.mempool.pool import MemPool
from tests.elastic.buffer_audit import audit_pages
from tests.mempool.pools import MIXES, SECRET, fill, holds_right, layout_of
from tests.patience import until

TEXT = list(range(100, 150))


def pool_at(
    folder: Path,
    mix: str = "all",
    large_pages: int = 64,
    held: int = 64,
    name: str = "a",
) -> MemPool:
    layout = layout_of(mix, large_pages)
    return MemPool(
        layout,
        instance=name,
        address=folder / name,
        secret=SECRET,
        cpu_buffer_bytes=held * layout.large_page_bytes,
    )


def buffer_of(pool: MemPool) -> HostBuffer:
    assert pool.buffer is not None
    return pool.buffer


def media(lease: Lease) -> set[str]:
    return {address.medium for address in lease.addresses}


def sound(pool: MemPool) -> bool:
    found = audit(pool.layout, pool.core.snapshot()) + audit_pages(buffer_of(pool).ledger)
    assert found == []
    return True


def evict_larges(pool: MemPool, larges: Sequence[int]) -> None:
    rows = np.asarray(larges, np.int32)
    pool.core.withhold(rows)  # type: ignore[attr-defined]
    pool.core.restore(rows)  # type: ignore[attr-defined]


def larges_of(pool: MemPool, tokens: Sequence[int], group: int, *, first: bool) -> list[int]:
    """Large pages with the first or the last half of a group's pages of a text."""
    known = pool.core.known(np.asarray(tokens, np.int32), "")
    own = known[known[:, 0] == group]
    half = own[: len(own) // 2] if first else own[len(own) // 2 :]
    return sorted({int(page) // pool.layout.groups[group].pages_per_large for page in half[:, 2]})


@pytest.mark.parametrize("mix", list(MIXES))
def test_what_is_swapped_out_leaves_the_pool_and_comes_back(mix: str, tmp_path: Path) -> None:
    with pool_at(tmp_path, mix) as pool:
        fill(pool, TEXT)
        assert pool.swap_out(TEXT) == len(TEXT)
        assert not any(pool.core.snapshot().cached)
        assert pool.match(TEXT).hit_tokens == 0
        assert buffer_of(pool).ledger.used_large > 0
        pool.memory[:] = 0
        assert pool.swap_in(TEXT) == len(TEXT)
        lease = pool.match(TEXT)
        assert lease.hit_tokens == len(TEXT)
        assert media(lease) == {"device"}
        assert holds_right(pool, lease, TEXT)
        pool.free_mem(lease)
        assert sound(pool)


def test_what_is_not_there_is_neither_swapped_out_nor_in(tmp_path: Path) -> None:
    with pool_at(tmp_path) as pool:
        assert pool.swap_out(TEXT) == pool.swap_in(TEXT) == 0
        fill(pool, TEXT)
        assert pool.swap_in(TEXT) == len(TEXT), "it is in the pool already"
        assert len(buffer_of(pool).pages) == 0


@pytest.mark.parametrize("mix", list(MIXES))
def test_match_answers_from_the_medium_that_is_asked(mix: str, tmp_path: Path) -> None:
    with pool_at(tmp_path, mix) as pool:
        fill(pool, TEXT)
        assert pool.match(TEXT, media="host").addresses == ()
        both = pool.match(TEXT, media="mixed")
        assert both.hit_tokens == len(TEXT) and media(both) == {"device"}
        pool.free_mem(both)
        pool.swap_out(TEXT)
        assert pool.match(TEXT, media="device").hit_tokens == 0
        for chosen in ("host", "mixed"):
            lease = pool.match(TEXT, media=chosen)
            assert lease.hit_tokens == len(TEXT)
            assert media(lease) == {"host"}
            assert holds_right(pool, lease, TEXT)
            assert pool.free_mem(lease)
        pool.swap_in(TEXT)
        assert pool.match(TEXT, media="host").hit_tokens == len(TEXT), "it is there too"
        assert sound(pool)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("group", [0, 1])
def test_half_in_each_is_one_match(group: int, first: bool, tmp_path: Path) -> None:
    with pool_at(tmp_path, "window") as pool:
        fill(pool, TEXT)
        gone = larges_of(pool, TEXT, group, first=first)
        pool.swap_out(TEXT)
        assert pool.swap_in(TEXT) == len(TEXT)
        gone = larges_of(pool, TEXT, group, first=first)
        evict_larges(pool, gone)
        assert pool.match(TEXT).hit_tokens < len(TEXT)
        lease = pool.match(TEXT, media="mixed")
        assert lease.hit_tokens == len(TEXT)
        assert media(lease) == {"device", "host"}
        assert holds_right(pool, lease, TEXT)
        with pytest.raises(TryLater):
            pool.alloc_mem(tokens=16 * 4096)
        assert holds_right(pool, lease, TEXT), "what is held is not evicted"
        assert pool.free_mem(lease)
        assert pool.swap_in(TEXT) == len(TEXT)
        again = pool.match(TEXT)
        assert again.hit_tokens == len(TEXT) and holds_right(pool, again, TEXT)
        pool.free_mem(again)
        assert sound(pool)
        assert not any(pool.core.snapshot().used)


def test_a_match_that_is_over_holds_nothing(tmp_path: Path) -> None:
    with pool_at(tmp_path, "window") as pool:
        fill(pool, TEXT)
        pool.swap_out(TEXT)
        pool.swap_in(TEXT)
        evict_larges(pool, larges_of(pool, TEXT, 0, first=True))
        pool.match(TEXT, media="mixed", seconds=0.05)
        assert any(pool.core.snapshot().used)
        until(lambda: not any(pool.core.snapshot().used))
        until(lambda: not buffer_of(pool).pages.pins)


def test_pages_that_others_have_stay_in_the_pool(tmp_path: Path) -> None:
    with pool_at(tmp_path, "full") as pool:
        fill(pool, TEXT)
        fill(pool, [*TEXT[:32], *range(16)])
        assert pool.swap_out(TEXT) == len(TEXT)
        assert pool.match(TEXT).hit_tokens == 32
        held = pool.match([*TEXT[:32], *range(16)])
        assert pool.swap_out([*TEXT[:32], *range(16)]) == 48
        assert pool.free_mem(held)
        assert pool.match([*TEXT[:32], *range(16)]).hit_tokens == 48, "it was held"


def test_the_oldest_text_makes_way_in_host_memory(tmp_path: Path) -> None:
    texts = [[start, *range(200, 247)] for start in range(4)]
    with pool_at(tmp_path, "full", held=4) as pool:
        for text in texts:
            fill(pool, text)
            assert pool.swap_out(text) == 48
        found = [pool.match(text, media="host").hit_tokens for text in texts]
        assert found[-1] == 48 and found[0] < 48
        assert sound(pool)


def test_what_is_matched_in_host_memory_does_not_make_way(tmp_path: Path) -> None:
    with pool_at(tmp_path, "full", held=4) as pool:
        fill(pool, TEXT)
        pool.swap_out(TEXT)
        lease = pool.match(TEXT, media="host")
        other = [1, *range(200, 300)]
        fill(pool, other)
        with pytest.raises(TryLater, match="host memory"):
            pool.swap_out(other)
        assert pool.match(other).hit_tokens == len(other), "it is where it was"
        assert holds_right(pool, lease, TEXT)
        pool.free_mem(lease)
        assert sound(pool)


def test_without_room_in_the_pool_nothing_comes_in(tmp_path: Path) -> None:
    with pool_at(tmp_path, "full", large_pages=8) as pool:
        fill(pool, TEXT)
        pool.swap_out(TEXT)
        lease = pool.alloc_mem(pages={pool.layout.groups[0].name: 6})
        with pytest.raises(TryLater, match="the pool has too little room"):
            pool.swap_in(TEXT)
        assert sound(pool)
        pool.free_mem(lease)
        assert pool.swap_in(TEXT) == len(TEXT)


def test_a_text_is_forgotten_in_both(tmp_path: Path) -> None:
    other = [*TEXT[:32], *range(16)]
    with pool_at(tmp_path, "full") as pool:
        for text in (TEXT, other):
            fill(pool, text)
            pool.swap_out(text)
        assert pool.delete(TEXT) == 2, "its last whole page, and the half-full one"
        assert pool.match(TEXT, media="mixed", seconds=0).hit_tokens == 32
        lease = pool.match(other, media="mixed")
        assert lease.hit_tokens == 48, "another text shares it"
        assert pool.delete(other) == 0, "it is held"
        pool.free_mem(lease)
        assert pool.delete(other) == 3
        assert len(buffer_of(pool).pages) == 0


def test_roots_share_nothing(tmp_path: Path) -> None:
    with pool_at(tmp_path) as pool:
        fill(pool, TEXT, root="salt")
        assert pool.swap_out(TEXT) == 0
        assert pool.swap_out(TEXT, root="salt") == len(TEXT)
        assert pool.match(TEXT, media="mixed").hit_tokens == 0
        assert pool.swap_in(TEXT, root="salt") == len(TEXT)


@pytest.mark.parametrize("mix", list(MIXES))
def test_a_text_is_brought_in_before_it_is_sent(mix: str, tmp_path: Path) -> None:
    with pool_at(tmp_path, mix) as a, pool_at(tmp_path, mix, name="b") as b:
        a.connect(tmp_path / "b")
        until(lambda: b.peers() == ["a"])
        fill(a, TEXT)
        a.swap_out(TEXT)
        a.memory[:] = 0
        assert a.transfer_with_insert("b", TEXT) == len(TEXT)
        lease = b.match(TEXT)
        assert lease.hit_tokens == len(TEXT) and holds_right(b, lease, TEXT)
        b.free_mem(lease)
        assert sound(a) and sound(b)


def test_a_pool_without_host_memory_says_so(tmp_path: Path) -> None:
    layout = layout_of("full")
    with MemPool(layout, instance="a") as pool:
        fill(pool, TEXT)
        for call in (pool.swap_out, pool.swap_in):
            with pytest.raises(ChangeSomething, match="cpu_buffer_bytes"):
                call(TEXT)
        with pytest.raises(ChangeSomething, match="cpu_buffer_bytes"):
            pool.match(TEXT, media="mixed")
        with pytest.raises(ChangeSomething, match="device, host, mixed"):
            pool.match(TEXT, media="tape")  # type: ignore[arg-type]
    with pytest.raises(ChangeSomething, match="less than a large page"):
        MemPool(layout, instance="a", cpu_buffer_bytes=layout.large_page_bytes - 1)

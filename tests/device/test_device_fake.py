"""The fake device does as the real one, and fails when told to."""

import pytest

from kvell.device.fake import FakePool
from kvell.device.host import HostPool
from kvell.device.physical import PhysicalPool
from kvell.errors import TryLater


def test_it_has_the_size_it_was_given_and_counts_its_calls() -> None:
    pool = FakePool(100)
    pool.buffer()[99] = 5
    assert pool.buffer()[99] == 5
    assert (pool.size_bytes, pool.calls) == (100, 2)


@pytest.mark.parametrize("succeed", [0, 2])
def test_it_fails_when_the_injected_failure_is_due(succeed: int) -> None:
    pool = FakePool(1, fail_after=succeed)
    for _ in range(succeed):
        assert len(pool.buffer()) == 1
    with pytest.raises(TryLater, match="injected failure"):
        pool.buffer()


@pytest.mark.parametrize("make", [FakePool, HostPool])
def test_both_devices_close_alike(make: type[FakePool] | type[HostPool]) -> None:
    pool: PhysicalPool = make(1)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.buffer()


def test_chunks_are_those_of_the_host() -> None:
    assert FakePool(1).chunk_bytes == HostPool.chunk_bytes == 2 << 20

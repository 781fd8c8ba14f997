"""Host memory: whole chunks, shared through a descriptor, closed once."""

import mmap
from pathlib import Path

import pytest

from kvell.device.host import CHUNK_BYTES, HostPool
from kvell.device.processor import Processor, processor
from kvell.errors import ChangeSomething


@pytest.mark.parametrize(("asked", "chunks"), [(1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2)])
def test_sizes_are_whole_chunks(asked: int, chunks: int) -> None:
    pool = HostPool(asked)
    assert pool.size_bytes == len(pool.buffer()) == chunks * pool.chunk_bytes
    pool.close()


def test_memory_is_zero_writable_and_the_same_each_time() -> None:
    pool = HostPool(CHUNK_BYTES)
    buffer = pool.buffer()
    assert buffer[:4] == bytes(4)
    buffer[CHUNK_BYTES - 4 :] = b"last"
    assert pool.buffer()[-4:] == b"last"
    pool.close()


def test_another_mapping_of_the_descriptor_sees_the_same_bytes() -> None:
    """What instances on one host rely on."""
    pool = HostPool(CHUNK_BYTES)
    with mmap.mmap(pool.descriptor, CHUNK_BYTES, prot=mmap.PROT_READ) as peer:
        pool.buffer()[10:14] = b"page"
        assert peer[10:14] == b"page"
    pool.close()


def test_closing_twice_is_harmless_and_using_it_is_refused() -> None:
    pool = HostPool(1)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.buffer()


def test_a_view_that_is_alive_keeps_its_memory() -> None:
    pool = HostPool(1)
    view = memoryview(pool.buffer())
    view[0] = 7
    pool.close()
    assert view[0] == 7
    view.release()


def test_a_range_the_system_refuses_names_the_flag() -> None:
    with pytest.raises(ChangeSomething, match="cannot be mapped") as told:
        HostPool(1 << 62)
    assert told.value.field == "--kv-memory"
    assert told.value.value == f"{1 << 62}B"
    assert "smaller" in told.value.remedy


CPUINFO = """processor : 0
cpu family : 25
model      : 17
model name : AMD EPYC
stepping   : 1
flags      : fpu avx2 sse2 avx512_bf16

processor : 1
model name : another
"""


def told(tmp_path: Path, text: str) -> Processor:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    return processor(tmp_path)


def test_a_name_and_what_kernels_choose_by(tmp_path: Path) -> None:
    assert told(tmp_path, CPUINFO) == Processor("AMD EPYC (25.17.1)", ("avx2", "avx512_bf16"))


def test_arm(tmp_path: Path) -> None:
    found = told(tmp_path, "processor : 0\nFeatures : fp asimd sve\n")
    assert found.features == ("asimd", "sve")
    assert found.name


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert processor(tmp_path).features == ()
    assert processor(tmp_path).name

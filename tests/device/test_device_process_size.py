"""What a process takes, read from what the system says."""

import ctypes
import mmap
from pathlib import Path

import pytest

from kvell.device.available import give_back_freed, process_bytes, tree_bytes
from kvell.vocabulary import KIB, MIB

ROLLUP = """\
55d0a0000000-7ffd0 ---p 00000000 00:00 0                          [rollup]
Rss:              999999 kB
Pss:              300000 kB
Pss_Anon:         120000 kB
Pss_File:         170000 kB
Pss_Shmem:         10000 kB
"""


def test_anonymous_and_shared_memory_count_and_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/smaps_rollup").write_text(ROLLUP)
    assert process_bytes(root=tmp_path) == 130_000 * KIB


def test_a_system_that_does_not_say_counts_as_nothing(tmp_path: Path) -> None:
    assert process_bytes(root=tmp_path) == 0


def test_another_process_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "proc/42").mkdir(parents=True)
    (tmp_path / "proc/42/smaps_rollup").write_text(ROLLUP)
    assert process_bytes(42, tmp_path) == 130_000 * KIB


def test_what_a_process_has_started_counts_with_it(tmp_path: Path) -> None:
    for pid, children in ((42, "43 44"), (43, ""), (44, "45"), (45, "")):
        (tmp_path / f"proc/{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/smaps_rollup").write_text(ROLLUP)
        (tmp_path / f"proc/{pid}/task/{pid}/children").write_text(children)
    assert tree_bytes(42, tmp_path) == 4 * 130_000 * KIB
    assert tree_bytes(44, tmp_path) == 2 * 130_000 * KIB
    assert tree_bytes(46, tmp_path) == 0


def test_memory_that_is_touched_is_counted() -> None:
    before = process_bytes()
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        for page in range(0, 32 * MIB, mmap.PAGESIZE):
            mapped[page] = 1
        assert 24 * MIB < process_bytes() - before < 64 * MIB


def test_what_was_freed_is_given_back() -> None:
    """Small pieces with one above them that lives: the C library would keep them."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(64 * KIB) for _ in range(1024)]
    for piece in pieces:
        ctypes.memset(piece, 1, 64 * KIB)
    for piece in pieces[:-1]:
        libc.free(piece)
    before = process_bytes()
    give_back_freed()
    assert before - process_bytes() > 32 * MIB
    libc.free(pieces[-1])

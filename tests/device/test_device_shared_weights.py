"""The file of shared weights: its manifest, its lock, and what other processes see of it."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from kvell.device.host import CHUNK_BYTES
from kvell.device.shared_weights import MANIFEST_BYTES, SharedWeights
from kvell.errors import ChangeSomething
from tests.device.locks import holder_of_the_lock

HOLDER = """
import sys
from kvell.device.shared_weights import SharedWeights
with SharedWeights(int(sys.argv[1])).memory_of("key") as memory:
    memory.take("what", 100).memory[:3] = b"abc"
    print("holding", flush=True)
    sys.stdin.read()
"""
READER = """
import sys
from kvell.device.shared_weights import SharedWeights
print("asking", flush=True)
with SharedWeights(int(sys.argv[1])).memory_of("key") as memory:
    piece = memory.take("what", 100)
print(piece.is_filled, bytes(piece.memory[:3]), flush=True)
piece.memory[0] = 1
"""


def fill(descriptor: int, key: str, what: str, content: bytes) -> bool:
    """Put a model of one piece there, or find it; return whether it was found."""
    with SharedWeights(descriptor).memory_of(key) as memory:
        piece = memory.take(what, len(content))
        if not piece.is_filled:
            piece.memory[: len(content)] = content
    assert bytes(piece.memory[: len(content)]) == content
    return piece.is_filled


def child(code: str, descriptor: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code, str(descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
    )


def test_a_second_comer_finds_what_the_first_put_there(descriptor: int) -> None:
    assert not fill(descriptor, "key", "what", b"abc")
    assert fill(descriptor, "key", "what", b"abc")


def test_models_lie_one_after_another(descriptor: int) -> None:
    long = bytes(CHUNK_BYTES) + b"end"
    for known in (False, True):
        assert fill(descriptor, "first", "what", long) is known
        assert fill(descriptor, "second", "what", b"other") is known
    first, second = SharedWeights(descriptor).entries()
    assert (first.key, second.key) == ("first", "second")
    assert first.pieces[0].offset_bytes == MANIFEST_BYTES
    assert second.pieces[0].offset_bytes == MANIFEST_BYTES + 2 * CHUNK_BYTES
    assert second.pieces[0].size_bytes == len(b"other")


@pytest.mark.parametrize(("what", "size_bytes"), [("other", 3), ("what", 4)])
def test_another_layout_under_the_same_key_gets_memory_of_its_own(
    descriptor: int, what: str, size_bytes: int
) -> None:
    fill(descriptor, "key", "what", b"abc")
    with SharedWeights(descriptor).memory_of("key") as memory:
        piece = memory.take(what, size_bytes)
        assert not piece.is_filled
        piece.memory[:size_bytes] = b"wxyz"[:size_bytes]
    assert fill(descriptor, "key", "what", b"abc"), "nothing was written to the file"


def test_more_pieces_than_the_file_has_are_of_its_own(descriptor: int) -> None:
    fill(descriptor, "key", "what", b"abc")
    with SharedWeights(descriptor).memory_of("key") as memory:
        found = [memory.take("what", 3).is_filled for _ in range(2)]
    assert found == [True, False]


def test_an_error_while_loading_leaves_the_file_as_it_was(descriptor: int) -> None:
    fill(descriptor, "first", "what", b"abc")
    shared = SharedWeights(descriptor)
    before = shared.entries()
    with pytest.raises(ZeroDivisionError), shared.memory_of("key") as memory:
        memory.take("what", 3).memory[:3] = b"bad"
        raise ZeroDivisionError
    assert shared.entries() == before
    assert holder_of_the_lock(descriptor) == 0
    assert not fill(descriptor, "key", "what", b"\0\0\0")
    assert fill(descriptor, "first", "what", b"abc")


def test_an_entry_without_its_length_is_not_there(descriptor: int) -> None:
    os.pwrite(descriptor, b'{"key": "key", "pieces": [', 8)
    assert SharedWeights(descriptor).entries() == []
    assert not fill(descriptor, "key", "what", b"abc")
    assert fill(descriptor, "key", "what", b"abc")


def test_a_full_manifest_is_an_error_and_not_an_overflow(descriptor: int) -> None:
    with pytest.raises(ValueError, match="full"):
        fill(descriptor, "k" * MANIFEST_BYTES, "what", b"abc")
    assert SharedWeights(descriptor).entries() == []


def test_the_first_killed_while_it_holds_the_lock_leaves_a_usable_file(descriptor: int) -> None:
    with child(HOLDER, descriptor) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"holding\n"
        assert holder_of_the_lock(descriptor) == first.pid
        with pytest.raises(BlockingIOError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first.kill()
        assert first.wait() == -signal.SIGKILL
    assert holder_of_the_lock(descriptor) == 0
    assert os.pread(descriptor, 3, MANIFEST_BYTES) == b"abc", "it died half way"
    with SharedWeights(descriptor).memory_of("key") as memory:
        piece = memory.take("what", 100)
        assert not piece.is_filled
        assert bytes(piece.memory[:3]) == b"\0\0\0", "the next one begins from scratch"
        piece.memory[:3] = b"new"
    assert len(SharedWeights(descriptor).entries()) == 1


def test_a_later_process_waits_for_the_first_and_may_only_read(descriptor: int) -> None:
    with SharedWeights(descriptor).memory_of("key") as memory:
        later = child(READER, descriptor)
        assert later.stdout is not None
        assert later.stdout.readline() == b"asking\n"
        memory.take("what", 100).memory[:3] = b"abc"
        assert later.poll() is None
    with later:
        assert later.stdout.read() == b"True b'abc'\n"
        assert later.wait() == -signal.SIGSEGV


def test_the_first_may_only_read_once_others_may_see_it(descriptor: int) -> None:
    with child(READER, descriptor) as first:
        assert first.stdout is not None
        assert first.stdout.read() == b"asking\nFalse b'\\x00\\x00\\x00'\n"
        assert first.wait() == -signal.SIGSEGV


def test_a_descriptor_of_no_file_is_refused() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    os.close(theirs)
    with pytest.raises(ChangeSomething, match="--weights-fd"):
        SharedWeights(theirs)

"""Memory is committed after the first request: in order, each chunk reported once, stoppable."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np

from kvell.device.chunks import Ints
from kvell.engine.setup.warmer import BATCH_CHUNKS, PATIENT, Warmer
from tests.device.fake_chunks import FakeChunks

PATIENCE_SECONDS = 20.0


class Gated(FakeChunks):
    def __init__(self, num_chunks: int) -> None:
        super().__init__(num_chunks, 64)
        self.permissions = threading.Semaphore(0)
        self.seen: list[int] = []

    def commit(self, chunks: Ints) -> None:
        assert self.permissions.acquire(timeout=PATIENCE_SECONDS)
        self.seen += chunks.tolist()
        super().commit(chunks)


def taken(warmer: Warmer, count: int) -> int:
    """Wait for ``count`` reported chunks, or for the end; return how many were reported."""
    total = warmer.take()
    while total < count and not warmer.is_done:
        warmer.wait(PATIENCE_SECONDS)
        total += warmer.take()
    return total + warmer.take()


def test_chunks_come_in_order_and_are_told_once() -> None:
    device = Gated(12)
    warmer = Warmer(device, range(2, 12))
    assert (warmer.take(), warmer.is_done) == (0, False)
    device.permissions.release()
    assert taken(warmer, BATCH_CHUNKS) == BATCH_CHUNKS
    assert warmer.take() == 0
    device.permissions.release(2)
    assert taken(warmer, 10 - BATCH_CHUNKS) == 10 - BATCH_CHUNKS
    warmer.wait(PATIENCE_SECONDS)
    assert warmer.is_done
    assert device.seen == list(range(2, 12))
    assert device.home.table.tolist() == [-1, -1, *range(2, 12)]


def test_memory_that_is_refused_ends_it_with_what_there_is() -> None:
    device = FakeChunks(12, 64)
    device.fail("commit", after=6)
    warmer = Warmer(device, range(12))
    assert taken(warmer, 12) == 6
    assert warmer.is_done
    assert np.count_nonzero(device.home.table >= 0) == 6


def test_it_ends_when_nobody_holds_it() -> None:
    device = Gated(400)
    warmer = Warmer(device, range(400))
    thread, gone = warmer.thread, weakref.ref(warmer)
    device.permissions.release(3)
    taken(warmer, 3 * BATCH_CHUNKS)
    threading.Timer(0.2, device.permissions.release).start()
    del warmer
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()
    assert len(device.seen) == 4 * BATCH_CHUNKS, "the batch in hand was finished"


class Priorities(FakeChunks):
    def __init__(self) -> None:
        super().__init__(12, 64)
        self.seen: list[int] = []

    def commit(self, chunks: Ints) -> None:
        self.seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        super().commit(chunks)


def test_a_patient_one_leaves_the_cores_to_others() -> None:
    mine, kind, usual = os.getpriority(os.PRIO_PROCESS, 0), Priorities(), Priorities()
    assert taken(Warmer(kind, range(12), is_patient=True), 12) == 12
    assert taken(Warmer(usual, range(12)), 12) == 12
    assert (set(kind.seen), set(usual.seen)) == ({PATIENT}, {mine})
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine, "only the thread's own"


EXITING = """
from kvell.device.host_chunks import HostChunks
from kvell.engine.setup.warmer import Warmer

device = HostChunks(512)
warmer = Warmer(device, range(512))
warmer.wait(20.0)
assert warmer.take() < 512
"""


def test_a_process_may_end_while_memory_still_comes() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITING], check=False, capture_output=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


HOURS = 36_000.0


def test_a_patient_one_rests_while_somebody_computes() -> None:
    """It would rest for hours, but computing ends."""
    device = Gated(4)
    warmer = Warmer(device, range(4), is_patient=True, rest_seconds=HOURS)
    warmer.computes(True)
    device.permissions.release(4)
    assert taken(warmer, 1) == 1
    assert device.seen == [0]
    warmer.wait(0.05)
    assert (device.seen, warmer.is_done) == ([0], False)
    warmer.computes(False)
    assert taken(warmer, 3) == 3
    warmer.finish()
    assert device.seen == [0, 1, 2, 3]


def test_who_rests_ends_at_once_when_nobody_holds_it() -> None:
    device = Gated(4)
    warmer = Warmer(device, range(4), is_patient=True, rest_seconds=HOURS)
    thread = warmer.thread
    warmer.computes(True)
    device.permissions.release(4)
    assert taken(warmer, 1) == 1
    del warmer
    gc.collect()
    assert not thread.is_alive()
    assert device.seen == [0]

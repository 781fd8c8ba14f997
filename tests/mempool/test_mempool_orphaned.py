"""A pool's folder after the process that made it was killed, while its children still run."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from kvell.mempool.rendezvous import make_folder, remove_orphaned

MOST_TRIES = 40
FILES, THREADS = 200, 20
"""What keeps a killed process busy between its sockets' ends and its own."""


def child(folder: Path, closed: socket.socket, told: Callable[[bytes], object]) -> None:
    """Waits for the parent's end, as an instance does, and says whether it still had a parent."""
    maker_pid = os.getppid()
    told(b".")
    closed.recv(1)
    has_parent = os.getppid() == maker_pid
    remove_orphaned(folder, maker_pid)
    told(b"early" if has_parent else b"late")
    os.kill(os.getpid(), signal.SIGKILL)


def parent(folder: Path, write_end: int) -> None:
    make_folder(folder)
    mine, its = socket.socketpair()
    if not os.fork():
        mine.close()
        child(folder, its, lambda text: os.write(write_end, text))
    its.close()
    for number in range(FILES):
        os.write(os.memfd_create(str(number)), bytes(100_000))
    for _ in range(THREADS):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.write(write_end, b".")
    threading.Event().wait()


def kill_parent(folder: Path) -> bytes:
    """Kill a parent whose child waits for that; return what the child saw."""
    folder.mkdir()
    read_end, write_end = os.pipe()
    process = get_context("fork").Process(target=parent, args=(folder, write_end))
    process.start()
    os.close(write_end)
    ready = b""
    while len(ready) < 2:
        ready += os.read(read_end, 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    seen = b"".join(iter(lambda: os.read(read_end, 9), b""))
    os.close(read_end)
    return seen


def test_it_is_removed_also_by_a_child_that_is_quicker_than_its_parents_end(
    tmp_path: Path,
) -> None:
    for number in range(MOST_TRIES):
        folder = tmp_path / str(number)
        seen = kill_parent(folder)
        assert not folder.exists()
        if seen == b"early":
            return
    raise AssertionError("no child was quicker")


def test_it_stays_while_the_process_that_made_it_lives(tmp_path: Path) -> None:
    make_folder(tmp_path)
    if not (pid := os.fork()):
        remove_orphaned(tmp_path, os.getppid())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert tmp_path.exists()

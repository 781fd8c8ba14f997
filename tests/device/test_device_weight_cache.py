"""The files of packed weights: what is found there, what is not, and what is removed."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvell.device.host import CHUNK_BYTES
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_cache import WeightCache
from kvell.device.weight_memory import PrivateWeights, WeightMemory
from kvell.vocabulary import GIB, MIB

LONG = np.random.default_rng(7).integers(0, 256, 2 * CHUNK_BYTES + 12_345, np.uint8).tobytes()
SHORT = b"embeddings"
PIECES = {"packed": LONG, "embeddings": SHORT}
BOTH = """
import sys
from pathlib import Path
from tests.device.test_device_weight_cache import load
print("here", flush=True)
sys.stdin.readline()
print(*load(Path(sys.argv[1])), flush=True)
"""


def load(
    folder: Path,
    key: str = "key",
    pieces: dict[str, bytes] = PIECES,
    most_bytes: int = GIB,
    memory: WeightMemory | None = None,
) -> list[bool]:
    """Put a model's pieces into memory and into the cache, or find them; say which were found."""
    cache = WeightCache(folder, most_bytes, least_bytes=1)
    found, taken = [], []
    with cache.memory_of(key, memory or PrivateWeights()) as cached:
        for what, content in pieces.items():
            piece = cached.take(what, len(content))
            if not piece.is_filled:
                np.frombuffer(piece.memory, np.uint8)[: len(content)] = list(content)
            found.append(piece.is_filled)
            taken.append((piece.memory, content))
    for held, content in taken:
        assert bytes(np.frombuffer(held, np.uint8)[: len(content)]) == content
    cache.wait()
    sizes = [len(content) for content in pieces.values()]
    assert cache.found_bytes == sum(np.array(found) * sizes) or memory is not None
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_second_load_finds_all_pieces(tmp_path: Path) -> None:
    assert load(tmp_path) == [False, False]
    (file,) = files(tmp_path)
    assert file.suffix == ".weights"
    assert load(tmp_path) == [True, True]
    assert files(tmp_path) == [file]


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_pieces_may_have_any_size(tmp_path: Path, size_bytes: int) -> None:
    pieces = {"packed": LONG[:size_bytes], "embeddings": SHORT}
    assert load(tmp_path, pieces=pieces) == [False, False]
    assert load(tmp_path, pieces=pieces) == [True, True]


def test_other_keys_have_other_files(tmp_path: Path) -> None:
    assert load(tmp_path, "first") == [False, False]
    assert load(tmp_path, "second", {"packed": SHORT}) == [False]
    assert load(tmp_path, "first") == [True, True]
    assert load(tmp_path, "second", {"packed": SHORT}) == [True]


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 12_344])
def test_a_damaged_chunk_is_packed_again(tmp_path: Path, at: int) -> None:
    load(tmp_path)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert load(tmp_path) == [False, False]
    assert load(tmp_path) == [True, True], "the file was written again"


def test_blocks_that_changed_places_are_noticed(tmp_path: Path) -> None:
    load(tmp_path)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[:4096], content[4096:8192] = content[4096:8192], content[:4096]
    file.write_bytes(content)
    assert load(tmp_path) == [False, False]


def test_a_damaged_piece_leaves_those_before_it(tmp_path: Path) -> None:
    load(tmp_path)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[content.index(SHORT)] ^= 1
    file.write_bytes(content)
    assert load(tmp_path) == [True, False]
    assert load(tmp_path) == [True, True]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_cut_file_is_removed(
    tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path)
    (file,) = files(tmp_path)
    os.truncate(file, int(file.stat().st_size * share))
    assert load(tmp_path) == [False, False]
    (line,) = caplog.messages
    assert "packed again: it is cut" in line
    assert load(tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"key":"key"', b'"key":"kez"'),
        (b'"sums":[', b'"sums":{'),
        (b'"offset_bytes":0', b'"offset_bytes":9'),
        (b'"offset_bytes":0', b'"offset_bytes":-9'),
        (b'"offset_bytes":0', b'"offset_bytes":9' + b"0" * 30),
    ],
)
def test_a_damaged_manifest_is_not_believed(tmp_path: Path, old: bytes, new: bytes) -> None:
    load(tmp_path)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    assert old in whole
    file.write_bytes(whole.replace(old, new, 1))
    assert load(tmp_path) == [False, False]
    assert load(tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ({"other": LONG, "embeddings": SHORT}, [False, False]),
        ({"packed": LONG[:-1], "embeddings": SHORT}, [False, False]),
        (PIECES | {"third": SHORT}, [True, True, False]),
    ],
)
def test_other_pieces_under_the_same_key_are_not_found(
    tmp_path: Path, pieces: dict[str, bytes], found: list[bool]
) -> None:
    load(tmp_path)
    assert load(tmp_path, pieces=pieces) == found
    assert load(tmp_path, pieces=pieces) == [True] * len(pieces)


def test_an_error_while_loading_writes_nothing(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, GIB, least_bytes=1)
    with pytest.raises(ZeroDivisionError), cache.memory_of("key", PrivateWeights()) as memory:
        memory.take("packed", 100)
        raise ZeroDivisionError
    cache.wait()
    assert files(tmp_path) == []


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size_bytes = len(SHORT) + 4096  # a manifest and a page, at least
    for key in ("a", "b", "c"):
        load(tmp_path, key, {"packed": SHORT})
    by_key = {path.read_bytes().split(b'"key":"')[1][:1]: path for path in files(tmp_path)}
    for age, oldest in enumerate((b"b", b"c", b"a")):
        os.utime(by_key[oldest], (age, age))
    assert load(tmp_path, "b", {"packed": SHORT}) == [True], "that is its last use"
    largest_bytes = max(path.stat().st_size for path in files(tmp_path))
    load(tmp_path, "d", {"packed": SHORT}, most_bytes=2 * largest_bytes + size_bytes)
    left = {path.read_bytes().split(b'"key":"')[1][:1] for path in files(tmp_path)}
    assert left == {b"a", b"b", b"d"}
    assert load(tmp_path, "c", {"packed": SHORT}) == [False]


def test_models_beyond_the_bound_and_small_ones_are_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path, most_bytes=MIB) == [False, False]
    (line,) = caplog.messages
    assert (
        line == "packed weights are not cached: 4.02 MiB are more than --weight-cache-size, 1 MiB"
    )
    cache = WeightCache(tmp_path, GIB)
    with cache.memory_of("key", PrivateWeights()) as memory:
        memory.take("packed", MIB)
    cache.wait()
    assert files(tmp_path) == []


def test_half_of_a_disk_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=6 * MIB))
    assert load(tmp_path) == [False, False]
    (line,) = caplog.messages
    assert "over half of what is free" in line
    assert files(tmp_path) == []


@pytest.mark.parametrize("folder", [Path("/proc/kvell/weights"), Path("/dev/null/weights")])
def test_a_directory_that_cannot_be_written_means_no_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(folder) == [False, False]
    (line,) = caplog.messages
    assert line.startswith(f"packed weights are not cached in {folder}: ")


def test_a_full_disk_means_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit of the size of files stands in for a disk that gets full half way."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.device.test_device_weight_cache import load\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))\n"
        "print(load(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[False, False]\n"
    assert "packed weights are not cached" in done.stderr
    assert done.stderr.count("\n") == 1
    assert files(tmp_path) == []


def test_files_that_nobody_writes_any_more_are_removed(tmp_path: Path) -> None:
    orphan, written = tmp_path / "a.0.partial", tmp_path / "b.0.partial"
    orphan.touch()
    with written.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        load(tmp_path)
    assert not orphan.exists()
    assert written.exists()


def test_two_processes_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BOTH, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for child in children:
        assert child.stdout.readline() == "here\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        assert child.communicate()[0] in ("False False\n", "True True\n")
    (file,) = files(tmp_path)
    assert file.suffix == ".weights"
    assert load(tmp_path) == [True, True]


def test_an_end_of_the_process_waits_for_the_file(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvell.device.weight_cache import WeightCache\n"
        "from kvell.device.weight_memory import PrivateWeights\n"
        "cache = WeightCache(Path(sys.argv[1]), 1 << 30)\n"
        "with cache.memory_of('key', PrivateWeights()) as memory:\n"
        "    memory.take('packed', 32 << 20)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    (file,) = files(tmp_path)
    assert file.stat().st_size > 32 * MIB


def test_shared_memory_is_filled_from_the_file_once(tmp_path: Path, descriptor: int) -> None:
    load(tmp_path)
    shared = SharedWeights(descriptor)
    with shared.memory_of("key") as memory:
        assert load(tmp_path, memory=memory) == [True, True]
    (file,) = files(tmp_path)
    file.unlink()
    with shared.memory_of("key") as memory:
        assert load(tmp_path, memory=memory) == [True, True], "they are in the shared memory"
    assert files(tmp_path) == [], "whoever packed them writes them"
    assert len(shared.entries()) == 1


def test_a_file_is_written_from_shared_memory(tmp_path: Path, descriptor: int) -> None:
    with SharedWeights(descriptor).memory_of("key") as memory:
        assert load(tmp_path, memory=memory) == [False, False]
    assert load(tmp_path) == [True, True]


def test_nothing_is_logged_if_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        load(tmp_path)
        load(tmp_path)
    assert caplog.messages == []

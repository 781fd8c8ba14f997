"""What the command line reads from its environment."""

import socket
from pathlib import Path

import pytest

from kvell.cli.terminal.environment import cache_dir, prepare_libraries, tell_service_manager
from kvell.device.available import available_bytes, default_kv_memory_bytes
from kvell.vocabulary import GIB, MIB

HOME = Path("/home/ada")


class TestCacheDir:
    def test_default(self) -> None:
        assert cache_dir({}, HOME) == HOME / ".cache/kvell"

    def test_shared_cache_home(self) -> None:
        assert cache_dir({"XDG_CACHE_HOME": "/big"}, HOME) == Path("/big/kvell")

    def test_own_variable_wins(self) -> None:
        environ = {"XDG_CACHE_HOME": "/big", "KVELL_CACHE_DIR": "/own"}
        assert cache_dir(environ, HOME) == Path("/own")

    def test_empty_variables_count_as_unset(self) -> None:
        environ = {"XDG_CACHE_HOME": "", "KVELL_CACHE_DIR": ""}
        assert cache_dir(environ, HOME) == HOME / ".cache/kvell"


class TestLibraries:
    def test_sets_threads_and_huge_pages(self) -> None:
        environ: dict[str, str] = {}
        prepare_libraries(environ, cores=6)
        assert environ["OMP_NUM_THREADS"] == "6"
        assert environ["THP_MEM_ALLOC_ENABLE"] == "1"

    def test_waiting_threads_sleep_soon(self) -> None:
        environ: dict[str, str] = {}
        prepare_libraries(environ, cores=6)
        assert int(environ["GOMP_SPINCOUNT"]) <= 1000

    def test_a_wait_policy_of_the_users_decides_alone(self) -> None:
        environ = {"OMP_WAIT_POLICY": "active"}
        prepare_libraries(environ, cores=6)
        assert "GOMP_SPINCOUNT" not in environ

    def test_keeps_what_the_user_set(self) -> None:
        environ = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "0"}
        prepare_libraries(environ, cores=6)
        assert environ["OMP_NUM_THREADS"] == "1"
        assert environ["THP_MEM_ALLOC_ENABLE"] == "0"


class TestDefaultKvMemory:
    @pytest.mark.parametrize(
        ("available", "expected"),
        [
            (8 * GIB, 2 * GIB),
            (1000 * MIB + 5, 250 * MIB),
            (1003 * MIB, 250 * MIB),
            (100 * MIB, 64 * MIB),
            (0, 64 * MIB),
            (1024 * GIB, 16 * GIB),
        ],
    )
    def test_is_a_bounded_quarter_in_whole_chunks(self, available: int, expected: int) -> None:
        assert default_kv_memory_bytes(available) == expected


class TestAvailable:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nX: 1 kB\n")
        return tmp_path

    def test_meminfo(self, root: Path) -> None:
        assert available_bytes(root) == 8000 * 1024

    def test_cgroup_v2_leaves_less(self, root: Path) -> None:
        write(root, "sys/fs/cgroup/memory.max", "5000000\n")
        write(root, "sys/fs/cgroup/memory.current", "2000000\n")
        assert available_bytes(root) == 3_000_000

    def test_cgroup_v1_leaves_less(self, root: Path) -> None:
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n")
        write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n")
        assert available_bytes(root) == 3_000_000

    def test_cgroup_without_a_limit(self, root: Path) -> None:
        write(root, "sys/fs/cgroup/memory.max", "max\n")
        write(root, "sys/fs/cgroup/memory.current", "2000000\n")
        assert available_bytes(root) == 8000 * 1024

    def test_its_own_cgroup_counts_as_much_as_those_above(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/slice/unit\n")
        write(root, "sys/fs/cgroup/slice/memory.max", "4000000\n")
        write(root, "sys/fs/cgroup/slice/memory.current", "1000000\n")
        assert available_bytes(root) == 3_000_000
        write(root, "sys/fs/cgroup/slice/unit/memory.max", "2000000\n")
        write(root, "sys/fs/cgroup/slice/unit/memory.current", "500000\n")
        assert available_bytes(root) == 1_500_000

    def test_file_pages_that_can_be_given_back_are_left(self, root: Path) -> None:
        write(root, "sys/fs/cgroup/memory.max", "5000000\n")
        write(root, "sys/fs/cgroup/memory.current", "4000000\n")
        write(root, "sys/fs/cgroup/memory.stat", "anon 9\ninactive_file 1500000\n")
        assert available_bytes(root) == 2_500_000

    def test_cgroup_that_is_over_its_limit(self, root: Path) -> None:
        write(root, "sys/fs/cgroup/memory.max", "1000\n")
        write(root, "sys/fs/cgroup/memory.current", "2000\n")
        assert available_bytes(root) == 0

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        assert available_bytes(tmp_path) == GIB

    def test_this_machine(self) -> None:
        assert available_bytes() > 0


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("address", ["{path}", "@kvell-test-{path}"])
def test_a_service_manager_is_told_that_it_answers(tmp_path: Path, address: str) -> None:
    name = address.format(path=tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if name[0] == "@" else name)
        manager.settimeout(5)
        tell_service_manager("READY=1", {"NOTIFY_SOCKET": name})
        assert manager.recv(64) == b"READY=1"


@pytest.mark.parametrize("address", ["", "no path", "/no/such/socket"])
def test_where_none_listens_nothing_happens(address: str) -> None:
    tell_service_manager("READY=1", {"NOTIFY_SOCKET": address} if address else {})

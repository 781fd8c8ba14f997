"""A launcher and its child, and a node of Ray as a child; another program stands in for Ray."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvell.cluster.steering.epochs import Leadership
from kvell.errors import KvellError, TryLater
from kvell.fleet.placing import node_record
from kvell.fleet.placing.launcher import LAST_LINES, Launcher
from kvell.fleet.placing.node_record import NodeRecord, read_record, record_of, started_at
from kvell.fleet.placing.placement import IncarnationEnd, InstancePlace
from kvell.fleet.placing.ray import node as ray_node
from kvell.fleet.placing.ray import node_settings
from kvell.fleet.placing.ray.node import RayNode
from kvell.fleet.placing.ray.node_settings import NodeSettings
from kvell.mempool.rendezvous import SECRET_BYTES
from tests.front.scenarios import is_gone
from tests.patience import until

SECRET = bytes(range(SECRET_BYTES))
PATIENCE_SECONDS = 20.0
WRITES = (
    "import sys, pathlib; s = sys.stdin.buffer.read(32); pathlib.Path(sys.argv[1]).write_bytes(s)"
)
LISTENS = "print('tcp://10.0.0.7:5', flush=True)"
STAYS = f"{WRITES}; {LISTENS}; sys.stdin.buffer.read()"


def program(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def ended(launcher: Launcher, incarnation: int) -> IncarnationEnd:
    until(lambda: launcher.end_of(incarnation) is not None)
    told = launcher.end_of(incarnation)
    assert told is not None
    return told


@pytest.fixture
def keep() -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def make(code: str) -> Launcher:
        made.append(Launcher(SECRET, "10.0.0.7", 3, program(code)))
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()


def test_the_child_hears_the_secret_and_nobody_sees_it(
    keep: Callable[..., Launcher], tmp_path: Path
) -> None:
    launcher, heard = keep(STAYS), tmp_path / "heard"
    placed = launcher.start([str(heard)], 5)
    assert (placed.host, placed.address) == ("10.0.0.7", "tcp://10.0.0.7:5")
    pid = placed.pid
    until(lambda: heard.exists() and heard.read_bytes() == SECRET)
    for name in ("cmdline", "environ"):
        assert SECRET not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert SECRET.hex().encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert launcher.end_of(5) is None


def test_what_its_machine_knows_is_filled_in(keep: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher, said = (
        keep("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))"),
        tmp_path / "said",
    )
    launcher.start([str(said), "--threads", "{threads}", "{host}", "{x}"], 1)
    assert ended(launcher, 1) == IncarnationEnd(0)
    assert said.read_text() == "--threads 3 10.0.0.7 {x}"


def test_the_same_incarnation_is_started_once_and_another_ends_it(
    keep: Callable[..., Launcher], tmp_path: Path
) -> None:
    launcher = keep(STAYS)
    words = [str(tmp_path / "heard")]
    first = launcher.start(words, 5)
    assert launcher.start(words, 5) == first
    second = launcher.start(words, 6)
    assert second != first
    assert is_gone(first.pid)
    assert launcher.runs() == (6, second)
    assert launcher.end_of(5) == IncarnationEnd(
        -9
    )  # it is not there any more, and was not asked how it ended
    assert launcher.end_of(6) is None
    launcher.stop(5)  # not the one that runs
    assert launcher.end_of(6) is None
    launcher.stop(6)
    assert ended(launcher, 6).exit_code == -signal.SIGKILL
    assert launcher.runs() is None
    launcher.stop(6)


def test_an_older_manager_ends_nothing_that_a_newer_one_started(
    keep: Callable[..., Launcher], tmp_path: Path
) -> None:
    keeper, words = keep(STAYS), [str(tmp_path / "heard")]
    newer, older = Leadership(8), Leadership(7)
    placed = keeper.start(words, newer.next_incarnation())
    with pytest.raises(PermissionError, match="newer manager"):
        keeper.start(words, older.next_incarnation())
    assert not is_gone(placed.pid) and keeper.runs() == ((8 << 16) + 1, placed)


def test_an_end_is_told_with_the_last_words(
    keep: Callable[..., Launcher], capfd: pytest.CaptureFixture[str]
) -> None:
    lines = LAST_LINES + 4
    launcher = keep(f"import sys\nfor n in range({lines}): print(n, file=sys.stderr)\nsys.exit(2)")
    launcher.start([], 1)
    told = ended(launcher, 1)
    assert told == IncarnationEnd(2, "".join(f"{n}\n" for n in range(4, lines)))
    assert capfd.readouterr().err.split() == [str(n) for n in range(lines)]


def test_a_child_that_ends_before_it_is_told_the_secret(keep: Callable[..., Launcher]) -> None:
    launcher = keep("import os; os.close(0); os._exit(3)")
    assert launcher.start([], 1).address == ""
    assert ended(launcher, 1) == IncarnationEnd(3)


def test_a_child_that_never_listens_is_killed(
    keep: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvell.fleet.placing.launcher.LISTEN_SECONDS", 0.2)
    launcher = keep("import sys; sys.stdin.buffer.read()")
    assert launcher.start([], 1).address == ""
    assert ended(launcher, 1).exit_code == -signal.SIGKILL


def test_a_stop_ends_a_start_that_waits(keep: Callable[..., Launcher], tmp_path: Path) -> None:
    """Neither a question nor the stop waits behind it."""
    launcher, heard = keep(f"{WRITES}; sys.stdin.buffer.read()"), tmp_path / "heard"
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(launcher.start, [str(heard)], 5)
        until(lambda: heard.exists() and heard.read_bytes() == SECRET)
        assert launcher.runs() is None  # it does not listen yet
        assert launcher.end_of(5) is None
        assert not started.done()
        launcher.stop(5)
        assert started.result(PATIENCE_SECONDS).address == ""
    assert ended(launcher, 5).exit_code == -signal.SIGKILL


def test_a_start_that_its_stop_overtook_starts_nothing(keep: Callable[..., Launcher]) -> None:
    launcher = keep(STAYS)
    launcher.stop(5)
    assert launcher.start([], 5) == InstancePlace("10.0.0.7", 0, "")
    assert launcher.end_of(5) == IncarnationEnd(-9)
    assert launcher.runs() is None


def test_starts_at_once_start_one_child(keep: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher = keep(STAYS)
    with ThreadPoolExecutor(4) as pool:
        words = [str(tmp_path / "heard")]
        placed = list(pool.map(lambda _: launcher.start(words, 5), range(4)))
    assert len(set(placed)) == 1
    assert placed[0].address == "tcp://10.0.0.7:5"


def test_another_start_ends_one_that_waits(keep: Callable[..., Launcher], tmp_path: Path) -> None:
    code = f"{WRITES}\nif sys.argv[2] == 'listen': {LISTENS}\nsys.stdin.buffer.read()"
    launcher, heard = keep(code), tmp_path / "heard"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(launcher.start, [str(heard), "wait"], 5)
        until(lambda: heard.exists() and heard.read_bytes() == SECRET)
        second = launcher.start([str(heard), "listen"], 6)
        assert first.result(PATIENCE_SECONDS).address == ""
    assert launcher.runs() == (6, second)
    assert is_gone(first.result().pid)


def test_a_program_that_is_not_there_is_said() -> None:
    with pytest.raises(OSError, match="nowhere"):
        Launcher(SECRET, "", 1, ("/nowhere/kvell",)).start([], 1)


def test_a_keeper_that_is_killed_takes_its_child_along(tmp_path: Path) -> None:
    """Nothing but the pipe tells the child: it ends as when its front hangs up."""
    said = tmp_path / "pid"
    code = (
        "import time\nfrom pathlib import Path\nfrom kvell.fleet.placing.launcher import Launcher\n"
        f"launcher = Launcher(bytes(32), '', 1, {program(STAYS)!r})\n"
        f"pid = launcher.start([{str(tmp_path / 'heard')!r}], 1).pid\n"
        f"Path({str(said)!r}).write_text(f'{{pid}}.')\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(program(code)) as parent:
        until(lambda: said.exists() and said.read_text().endswith("."))
        pid = int(said.read_text()[:-1])
        assert not is_gone(pid)
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: is_gone(pid))


RUNS = """
import pathlib, signal, sys
folder = next(w.partition("=")[2] for w in sys.argv if w.startswith("--temp-dir="))
pathlib.Path(folder, "ray_current_cluster").write_text("10.0.0.1:6379\\n")
print("Ray runtime started.", flush=True)
signal.pause()
"""
DEAF = RUNS.replace(
    "import pathlib", "import signal; signal.signal(15, signal.SIG_IGN)\nimport pathlib"
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def stands(code: str) -> None:
        monkeypatch.setattr(node_settings, "RAY", (sys.executable, "-c", code))

    return stands


def test_it_runs_until_its_end_and_leaves_no_files(stand_in: Callable[[str], None]) -> None:
    stand_in(RUNS)
    node = RayNode(NodeSettings(), os.environ)
    with node:
        pid, folder = node.pid, node.folder
        assert node.address == "10.0.0.1:6379"
        assert folder is not None and folder.is_dir()
    assert is_gone(pid)
    assert not folder.exists()


def test_its_address_is_known_though_ray_writes_it_last(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says that it runs, and then makes the file, and then writes into it."""
    stand_in("import signal; print('Ray runtime started.', flush=True); signal.pause()")
    with RayNode(NodeSettings("10.0.0.2:6379"), os.environ) as node:
        assert node.address == "10.0.0.2:6379", "that of the cluster which it joins"
    file = tmp_path / "ray_current_cluster"
    texts = iter(["", "10.0.0.1:6379\n"])

    def between_looks(seconds: float) -> None:
        if b"started" in (tmp_path / "ray.log").read_bytes():
            file.write_text(next(texts))
        else:
            time.sleep(seconds)

    looks = SimpleNamespace(monotonic=time.monotonic, sleep=between_looks)
    monkeypatch.setattr(ray_node, "time", looks)
    with RayNode(NodeSettings(), os.environ, tmp_path) as node:
        assert node.address == "10.0.0.1:6379"


def test_one_that_does_not_listen_is_killed(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(DEAF)
    monkeypatch.setattr(ray_node, "END_SECONDS", 0.2)
    with RayNode(NodeSettings(), os.environ) as node:
        pid = node.pid
    assert is_gone(pid)


def test_one_that_does_not_start_says_why(stand_in: Callable[[str], None]) -> None:
    stand_in("print('noise'); raise SystemExit('ValueError: the port is taken')")
    with pytest.raises(KvellError, match="the port is taken"), RayNode(NodeSettings(), os.environ):
        raise AssertionError("it runs")


def test_one_that_takes_too_long_is_ended(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in("import os, time, sys; print(os.getpid(), flush=True); time.sleep(60)")
    monkeypatch.setattr(ray_node, "START_SECONDS", 2.0)
    node = RayNode(NodeSettings(), os.environ, tmp_path)
    with pytest.raises(TryLater, match="within 2 s"):
        node.start()
    pid = int((tmp_path / "ray.log").read_text())
    assert is_gone(pid)


def test_it_does_not_outlive_whoever_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from kvell.fleet.placing.ray import node as ray_node, node_settings\n"
        f"node_settings.RAY = (sys.executable, '-c', {RUNS!r})\n"
        "node = ray_node.RayNode(node_settings.NodeSettings(), os.environ)\nnode.start()\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(f'{{node.pid}}.')\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        said = tmp_path / "pid"
        until(lambda: said.exists() and said.read_text().endswith("."))
        pid = int(said.read_text()[:-1])
        parent.kill()
    until(lambda: is_gone(pid))


def test_what_ray_is_given() -> None:
    head = NodeSettings(host="10.0.0.1", port=6379, processors=4).words(Path("/x"))
    assert {"--head", "--port=6379", "--temp-dir=/x", "--node-ip-address=10.0.0.1"} <= set(head)
    assert {"--num-cpus=4", "--block", "--disable-usage-stats"} <= set(head)
    assert "--ray-client-server-port=10001" in head
    member = NodeSettings("10.0.0.1:6379").words(Path("/x"))
    assert "--address=10.0.0.1:6379" in member
    assert not [word for word in member if word.startswith(("--head", "--port", "--num", "--temp"))]
    free = [NodeSettings(clients_port=0).words(Path("/x")) for _ in range(2)]
    ports = [w.partition("=")[2] for ws in free for w in ws if w.startswith("--ray-client")]
    assert all(int(port) > 1024 for port in ports)


def test_a_record_is_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    with subprocess.Popen(["sleep", "60"]) as child:
        record = record_of(child.pid, "10.0.0.1:6379", folder)
        record.save(tmp_path / "cache")
        assert read_record(tmp_path / "cache") == record
        assert record.runs()
        other = NodeRecord(child.pid, record.started + 1, record.address, record.folder)
        assert not other.runs()  # the same process id, and another process
        record.end(tmp_path / "cache", PATIENCE_SECONDS)
        assert child.wait(PATIENCE_SECONDS) == -15
    assert not record.runs()
    assert read_record(tmp_path / "cache") is None
    assert not folder.exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_process_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        other = NodeRecord(child.pid, started_at(child.pid) - 1, "", str(tmp_path / "none"))
        other.save(tmp_path)
        assert read_record(tmp_path) is None
        other.end(tmp_path, PATIENCE_SECONDS)
        assert child.poll() is None
        child.kill()


def test_one_that_does_not_end_in_time_is_said(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        record = record_of(child.pid, "", tmp_path / "none")
        record.save(tmp_path)
        with pytest.raises(TryLater, match="has not ended"):
            record.end(tmp_path, 0.2)
        assert read_record(tmp_path) == record
        child.kill()


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"pid": "x"}'])
def test_a_file_that_says_nothing_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / node_record.FILE).write_bytes(content)
    assert read_record(tmp_path) is None

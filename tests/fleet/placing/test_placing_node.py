"""A node of Ray as a child, and what is written down of it; another program stands in for Ray."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvell.errors import KvellError, TryLater
from kvell.fleet.placing import node_record
from kvell.fleet.placing.node_record import NodeRecord, read_record, record_of, started_at
from kvell.fleet.placing.ray import node as ray_node
from kvell.fleet.placing.ray import node_settings
from kvell.fleet.placing.ray.node import RayNode
from kvell.fleet.placing.ray.node_settings import NodeSettings
from tests.front.scenarios import is_gone

PATIENCE_SECONDS = 20.0
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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def stands(code: str) -> None:
        monkeypatch.setattr(node_settings, "RAY", (sys.executable, "-c", code))

    return stands


def test_it_runs_until_its_end_and_leaves_no_files(stand_in: Callable[[str], None]) -> None:
    stand_in(RUNS)
    node = RayNode(NodeSettings(), os.environ)
    with node:
        pid, folder = node.pid, node._folder
        assert node.address == "10.0.0.1:6379"
        assert folder is not None and folder.is_dir()
    assert is_gone(pid)
    assert not folder.exists()


def test_its_address_is_known_though_ray_writes_it_last(stand_in: Callable[[str], None]) -> None:
    """It says that it runs, and then makes the file, and then writes into it."""
    late = """
import pathlib, signal, sys, time
folder = next(w.partition("=")[2] for w in sys.argv if w.startswith("--temp-dir="))
file = pathlib.Path(folder, "ray_current_cluster")
print("Ray runtime started.", flush=True)
time.sleep(0.2)
file.touch()
time.sleep(0.2)
file.write_text("10.0.0.1:6379\\n")
signal.pause()
"""
    stand_in(late)
    with RayNode(NodeSettings(), os.environ) as node:
        assert node.address == "10.0.0.1:6379"
    stand_in("import signal; print('Ray runtime started.', flush=True); signal.pause()")
    with RayNode(NodeSettings("10.0.0.2:6379"), os.environ) as node:
        assert node.address == "10.0.0.2:6379", "that of the cluster which it joins"


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


# ------------------------------------------------------------------- what is written down


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

"""Starts on a real Ray: without room, interrupted, and with a manager that is killed meanwhile."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path

import pytest

from kvell.fleet.placing.ray import node_settings
from kvell.fleet.placing.ray.node import RayNode
from kvell.fleet.placing.ray.node_settings import NodeSettings
from tests.fleet.placing.ray_machines import PATIENCE_SECONDS, QUICK, family, is_gone, until
from tests.fleet.placing.ray_observer import RayObserver, observed

pytest.importorskip("ray")

HOST = "127.0.0.5"
PROCESSORS = 2
MANAGER_WORDS, INSTANCE_WORDS = "ray::ManagerActor", "kvell.cli.main instance"
NEVER_LISTENS = "kvell.cli.main meet"
"""In place of an instance: it reads stdin to its end, and says nothing."""


@dataclass(frozen=True)
class Server:
    """``kvell serve`` while it starts, and what it has said so far."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def ended(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def serving(folder: Path, environ: dict[str, str], *words: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    command += ["--kv-memory", "64MiB", *words]
    with (
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
        subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environ) as process,
    ):
        try:
            yield Server(process, folder)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def environ(smollm2_path: Path) -> dict[str, str]:
    own = {"KVELL_CACHE_DIR": str(smollm2_path.parent), "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def machine(environ: dict[str, str]) -> Iterator[RayNode]:
    settings = NodeSettings(host=HOST, processors=PROCESSORS, clients_port=0)
    with RayNode(settings, environ | QUICK) as node:
        yield node


@pytest.fixture
def observer(machine: RayNode, environ: dict[str, str]) -> Iterator[RayObserver]:
    with observed(machine.address, environ) as seen:
        yield seen


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For temporary files: Ray's sockets are in it, and have short names."""
    folder = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def running(root: int, words: str) -> list[int]:
    """Process ids below a process, of those whose command lines have these words."""
    return [pid for pid, line in family(root).items() if words in line]


@pytest.mark.long
def test_no_room_is_said_with_what_is_missing(
    machine: RayNode, observer: RayObserver, environ: dict[str, str], tmp_path: Path
) -> None:
    words = "--instances", "prefill=1,decode=2", "--cluster", machine.address
    with serving(tmp_path, environ, *words) as server:
        assert server.ended() == 2
        [line] = [one for one in server.stderr.splitlines() if one.startswith("kvell: --")]
        assert line.startswith("kvell: --instances=prefill=1,decode=2: no room: 3 CPUs wanted")
        assert f"2 free in Ray ({HOST} has 2 of 2 free)" in line
        assert "use at most 2 here" in line
    until(lambda: not running(machine.pid, MANAGER_WORDS))
    assert observer.groups() == {} and observer.actors() == []


@pytest.mark.long
def test_a_manager_killed_while_ray_places_leaves_no_reservation(
    machine: RayNode, observer: RayObserver, environ: dict[str, str], tmp_path: Path
) -> None:
    """Another takes over, and starts the cluster once there is room."""
    observer.hold()
    words = "--instances", "mixed=2", "--cluster", machine.address
    with serving(tmp_path, environ, *words) as server:
        until(lambda: "PENDING" in observer.groups().values())
        [first] = running(machine.pid, MANAGER_WORDS)
        os.kill(first, signal.SIGKILL)
        assert "PENDING" in observer.groups().values(), "it was killed too late"
        until(lambda: running(machine.pid, MANAGER_WORDS) not in ([], [first]))
        observer.release()
        until(lambda: bool(server.stdout))
        assert sorted(observer.groups().values()) == ["CREATED"]
        server.process.terminate()
        assert server.ended() == 0
    until(lambda: not running(machine.pid, MANAGER_WORDS))
    assert observer.groups() == {} and observer.actors() == []


PLACING = """
import asyncio, sys
from kvell.fleet.placing.ray.connection import connect
from kvell.fleet.placing.ray.placement import RayPlacement

async def place():
    placement = RayPlacement(bytes(32), "halfway")
    placement.enter("mixed-0")
    placement.enter("mixed-1")
    await placement.start("mixed-0", ["meet"], 7, 60.0)

async def find():
    placement = RayPlacement(bytes(32), "halfway")
    print(*sorted(one.instance_id for one in await placement.find()))
    await placement.close()

connect(sys.argv[1])
asyncio.run(place() if sys.argv[2] == "place" else find())
"""


@pytest.mark.long
def test_an_instance_without_a_launcher_yet_is_found(
    machine: RayNode, observer: RayObserver, environ: dict[str, str]
) -> None:
    """Whoever places is killed between the launchers of two instances."""
    command = [sys.executable, "-c", PLACING, machine.address]
    with subprocess.Popen([*command, "place"], env=environ) as script:
        until(lambda: bool(running(machine.pid, NEVER_LISTENS)))
        script.kill()
    assert len(observer.actors()) == 1, "it was killed too late"
    found = subprocess.check_output([*command, "find"], env=environ, timeout=PATIENCE_SECONDS)
    assert found.decode().split() == ["mixed-0", "mixed-1"]
    until(lambda: not running(machine.pid, NEVER_LISTENS))
    assert observer.groups() == {} and observer.actors() == []


STOPPING = """
import asyncio, sys
from kvell.fleet.placing.ray.connection import connect
from kvell.fleet.placing.ray.placement import RayPlacement

async def main():
    placement = RayPlacement(bytes(32), "stopping")
    placement.enter("mixed-0")
    start = asyncio.create_task(placement.start("mixed-0", ["meet"], 7, 60.0))
    await asyncio.to_thread(sys.stdin.readline)
    print(await placement.end_of("mixed-0", 7), flush=True)
    await placement.stop("mixed-0", 7)
    print((await start).address == "", await placement.end_of("mixed-0", 7), flush=True)
    print((await placement.start("mixed-0", ["meet"], 7, 60.0)).pid, flush=True)
    await placement.close()

connect(sys.argv[1])
asyncio.run(main())
"""


@pytest.mark.long
def test_nobody_waits_behind_a_start(
    machine: RayNode, observer: RayObserver, environ: dict[str, str]
) -> None:
    command = [sys.executable, "-c", STOPPING, machine.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as script:
        until(lambda: bool(running(machine.pid, NEVER_LISTENS)))
        said, _ = script.communicate("go on\n", PATIENCE_SECONDS)
    assert said.splitlines() == ["None", "True IncarnationEnd(exit_code=-9, last_words='')", "0"]
    assert script.returncode == 0
    assert not running(machine.pid, NEVER_LISTENS)
    assert observer.groups() == {} and observer.actors() == []


HEAD_ID = f"{0xFFFFF << 204:056x}"
SCALING = """
cluster_name: fake
max_workers: 0
idle_timeout_minutes: 10
upscaling_speed: 1.0
head_node_type: ray.head.default
provider: {type: fake_multinode, use_node_id_as_ip: true}
available_node_types:
  ray.head.default: {resources: {CPU: 1}, node_config: {}, min_workers: 0, max_workers: 0}
"""
LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "rsync_exclude"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    *("cluster_synced_files", "rsync_filter"),
)


@pytest.mark.long
def test_an_autoscaler_is_waited_for(
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    short_folder: Path,
) -> None:
    """It is Ray's own; it starts no machine, since machines are beyond this test."""
    config = tmp_path / "scaling.yaml"
    config.write_text(SCALING + "".join(f"{name}: []\n" for name in LISTS))
    with config.open("a") as file:
        file.write("auth: {}\ndocker: {}\nfile_mounts: {}\nfile_mounts_sync_continuously: false\n")
    monkeypatch.setattr(
        node_settings, "RAY", (*node_settings.RAY, f"--autoscaling-config={config}")
    )
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": 32 * "a"}
    head = {"RAY_FAKE_CLUSTER": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
    settings = NodeSettings(host=HOST, processors=1, clients_port=0)
    seldom = QUICK | {"AUTOSCALER_UPDATE_INTERVAL_S": "8"}  # whoever places waits for a report
    with RayNode(settings, environ | token | head | seldom, short_folder) as node:
        words = "--instances", "prefill=1,decode=2", "--cluster", node.address
        with serving(tmp_path, environ | token, *words) as server:
            until(lambda: "autoscaler" in server.stderr or server.process.poll() is not None)
            [line, *_] = [one for one in server.stderr.splitlines() if "autoscaler" in one]
            assert "waiting for prefill-0, decode-0, decode-1 to be ready, which need " in line
            assert "machines of Ray's autoscaler (3 CPUs wanted" in line
            assert server.process.poll() is None
            server.process.terminate()
            assert server.ended() == 130


MOMENTS = {"Ray": "gcs_server", "the manager": MANAGER_WORDS, "an instance": INSTANCE_WORDS}
"""What a start has just come to, and the process that shows it."""


@pytest.fixture(autouse=True)
def hears_interrupts() -> Iterator[None]:
    """Children inherit it if SIGINT is ignored here, as in a background job of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("moment", "number", "drains"),
    [
        ("Ray", signal.SIGTERM, False),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [
                ("the manager", signal.SIGTERM, True),
                ("an instance", signal.SIGTERM, False),
                ("the manager", signal.SIGINT, False),
            ]
        ),
    ],
)
def test_an_interrupted_start_leaves_nothing(
    environ: dict[str, str],
    tmp_path: Path,
    short_folder: Path,
    moment: str,
    number: signal.Signals,
    drains: bool,
) -> None:
    """Ray by itself drains for half a minute, whatever its actors do."""
    here = environ | {"TMPDIR": str(short_folder)} | ({} if drains else QUICK)
    with serving(tmp_path, here, "--cluster", "local-ray") as server:
        until(lambda: bool(running(server.process.pid, MOMENTS[moment])))
        assert list(short_folder.iterdir())
        assert not server.stdout, "it was interrupted too late"
        everything = family(server.process.pid)
        server.process.send_signal(number)
        code = server.ended()
    until(lambda: all(is_gone(pid) for pid in everything))
    assert list(short_folder.iterdir()) == []
    assert code == 130


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_an_interrupted_start_on_this_machine_leaves_nothing(
    environ: dict[str, str], tmp_path: Path, short_folder: Path, number: signal.Signals
) -> None:
    """The same without Ray, where instances meet in a folder."""
    here = environ | {"TMPDIR": str(short_folder)}
    with serving(tmp_path, here, "--instances", "prefill=1,decode=1") as server:
        until(lambda: len(running(server.process.pid, INSTANCE_WORDS)) == 2)
        assert list(short_folder.iterdir())
        assert not server.stdout, "it was interrupted too late"
        everything = family(server.process.pid)
        server.process.send_signal(number)
        code = server.ended()
    until(lambda: all(is_gone(pid) for pid in everything))
    assert list(short_folder.iterdir()) == []
    assert code == 130


def test_an_interrupted_up_leaves_nothing(environ: dict[str, str], short_folder: Path) -> None:
    """Else ``kvell cluster down`` would not know the Ray that runs."""
    own = QUICK | {"TMPDIR": str(short_folder), "KVELL_CACHE_DIR": str(short_folder / "cache")}
    command = [sys.executable, "-m", "kvell.cli.main", "cluster", "up", "--host", HOST]
    command += ["--port", str(free_port()), "--client-port", str(free_port())]
    with subprocess.Popen(command, env=environ | own) as up:
        until(lambda: bool(running(up.pid, "gcs_server")))
        everything = family(up.pid)
        up.terminate()
        code = up.wait(PATIENCE_SECONDS)
    try:
        until(lambda: all(is_gone(pid) for pid in everything))
        assert list(short_folder.iterdir()) == []
        assert code == 130
    finally:
        for pid in filterfalse(is_gone, everything):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.skipif((os.cpu_count() or 1) > 4, reason="there would be too many instances")
def test_a_local_ray_shares_its_processors(
    environ: dict[str, str], tmp_path: Path, short_folder: Path
) -> None:
    """There are more instances than processors, as there may be behind one front."""
    count = (os.cpu_count() or 1) + 1
    here = environ | {"TMPDIR": str(short_folder)} | QUICK
    words = "--instances", f"mixed={count}", "--cluster", "local-ray"
    with serving(tmp_path, here, *words) as server:
        until(lambda: bool(server.stdout))
        assert json.loads(server.stdout)["pid"] == server.process.pid
        assert len(running(server.process.pid, INSTANCE_WORDS)) == count
        assert "waiting for mixed-0, mixed-1" in server.stderr
        server.process.terminate()
        assert server.ended() == 0
    assert list(short_folder.iterdir()) == []

"""``kvell serve --cluster`` and ``kvell cluster up | down``; something else stands in for Ray."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvell.cli.main import root
from kvell.cli.terminal.session import Session
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.command import placed_command
from kvell.fleet.placing.node_record import NodeRecord, read_record
from kvell.fleet.placing.ray.node_settings import NodeSettings
from kvell.server.text.served_text import ServedText

Kvell = Callable[..., Any]


class FakeNode:
    """Stands in for a node of Ray: a process that sleeps."""

    made: ClassVar[list["FakeNode"]] = []

    def __init__(
        self,
        settings: NodeSettings,
        environ: Mapping[str, str],
        folder: Path | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        self.settings, self.environ, self.outlives = settings, dict(environ), outlives
        self.address = settings.joins or "10.0.0.1:6379"
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kvell-ray-"))
        self.process: subprocess.Popen[bytes] | None = None
        FakeNode.made.append(self)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"])

    def end(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNode]]:
    FakeNode.made = []
    monkeypatch.setattr("kvell.fleet.placing.ray.node.RayNode", FakeNode)
    monkeypatch.setattr("kvell.fleet.placing.opening.check_ray", lambda cluster: None)
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    yield FakeNode.made
    for node in FakeNode.made:
        shutil.rmtree(node.folder, ignore_errors=True)
        if node.process is not None:
            node.end()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Commands and options that would be served, and whether the last node of Ray runs then."""
    calls: list[tuple[Any, ...]] = []

    def serve(command: Any, texts: Any, options: Any, *_: Any) -> None:
        processes = [node.process for node in FakeNode.made]
        runs = [one is not None and one.poll() is None for one in processes]
        calls.append((command, options, runs))

    monkeypatch.setattr("kvell.server.run.serve", serve)
    monkeypatch.setattr(ServedText, "load", lambda name, path, *_: name)
    monkeypatch.setattr(
        "kvell.models.sources.source.resolve_model", lambda model, *_: Path("somewhere")
    )
    monkeypatch.setattr("kvell.engine.unloaded.check_named", lambda *_: None)
    return calls


class TestServe:
    def test_without_a_cluster_nothing_of_it_is_there(
        self, kvell: Kvell, served: list[Any], nodes: list[FakeNode]
    ) -> None:
        assert kvell("serve").code == 0
        [(command, options, _)] = served
        assert options.cluster is None
        assert "--pool-host" not in command and not nodes

    @pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1:6379", "auto"])
    def test_an_address_arrives_and_instances_are_placed(
        self, kvell: Kvell, served: list[Any], nodes: list[FakeNode], address: str
    ) -> None:
        ended = kvell("serve", "--cluster", address, "--cluster-name", "blue")
        assert ended.code == 0
        [(command, options, _)] = served
        assert (options.cluster, options.cluster_name) == (address, "blue")
        assert command[0] == "instance" and "{host}" in command
        assert not nodes

    def test_each_instance_takes_its_own_default_of_memory(
        self, kvell: Kvell, served: list[Any], nodes: list[FakeNode]
    ) -> None:
        """What this machine has says nothing of the others."""
        kvell("serve", "--instances", "mixed=2")
        kvell("serve", "--instances", "mixed=2", "--cluster", "auto")
        assert ["--kv-memory" in command for command, _, _ in served] == [True, False]

    def test_a_ray_of_its_own_runs_while_it_serves_and_asks_for_a_token(
        self, kvell: Kvell, served: list[Any], nodes: list[FakeNode], monkeypatch: Any
    ) -> None:
        monkeypatch.delenv("RAY_AUTH_MODE")
        assert kvell("serve", "--cluster", "local-ray").code == 0
        [(_, options, runs)] = served
        assert (options.cluster, runs) == ("10.0.0.1:6379", [True])
        [node] = nodes
        assert node.settings.host == "127.0.0.2" and not node.outlives
        assert node.settings.is_shared
        assert node.process is not None and node.process.poll() is not None
        assert node.environ["RAY_AUTH_MODE"] == "token"
        assert len(node.environ["RAY_AUTH_TOKEN"]) == 64

    @pytest.mark.parametrize(
        "address", ["", "10.0.0.1", "ray://10.0.0.1", "tcp://10.0.0.1:1", "ray://h:x", "local"]
    )
    def test_what_is_no_address_is_refused(
        self, kvell: Kvell, served: list[Any], nodes: list[FakeNode], address: str
    ) -> None:
        ended = kvell("serve", "--cluster", address)
        assert (ended.code, served) == (2, [])
        assert f"--cluster={address}: is not an address of a cluster; write it like" in ended.stderr

    @pytest.mark.parametrize("name", ["", "a/b", "two words", "x" * 41])
    def test_a_name_that_is_no_word_is_refused(
        self, kvell: Kvell, served: list[Any], nodes: list[FakeNode], name: str
    ) -> None:
        ended = kvell("serve", "--cluster", "auto", "--cluster-name", name)
        assert (ended.code, served) == (2, [])
        assert f"--cluster-name={name}: must be letters, digits" in ended.stderr

    def test_without_the_extra_the_remedy_is_named(
        self, kvell: Kvell, served: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        ended = kvell("serve", "--cluster", "local-ray")
        assert (ended.code, served) == (2, [])
        assert 'pip install "kvell[ray]"' in ended.stderr


class TestInstance:
    def test_its_arguments_are_read(self) -> None:
        """Also those that its machine fills in."""
        values = {
            "{incarnation}": "7",
            "{threads}": "3",
            "{memory_parts}": "2",
            "{instance_id}": "decode-1",
            "{role}": "decode",
            "{pool_name}": "kvell-x",
            "{host}": "10.0.0.2",
            "{pd_caching}": "2",
        }
        words = placed_command(EngineSettings(model="smollm2"))
        args = [values.get(word, word) for word in words[1:]]
        assert not [word for word in args if word.startswith("{")]
        session = Session(cache_dir=Path("unused"))
        with root.commands["instance"].make_context("instance", args, obj=session) as context:
            read = context.params
        assert (read["incarnation"], read["most_threads"], read["memory_parts"]) == (7, 3, 2)
        assert (read["instance_id"], read["role"], read["pd_caching"]) == ("decode-1", "decode", 2)
        assert (read["pool_name"], read["pool_host"]) == ("kvell-x", "10.0.0.2")
        assert (read["socket_fd"], read["pool_dir"]) == (-1, "")


class TestUpAndDown:
    def test_a_node_runs_until_it_is_ended(
        self, kvell: Kvell, nodes: list[FakeNode], tmp_path: Path
    ) -> None:
        ended = kvell("cluster", "up", "--host", "10.0.0.1", "--port", "7000", "--cpus", "4")
        assert ended.code == 0
        [node] = nodes
        assert node.settings == NodeSettings("", "10.0.0.1", 7000, 4, 10001)
        assert node.outlives
        assert "kvell cluster up --join 10.0.0.1:6379" in ended.stdout
        assert "RAY_AUTH_MODE=token" in ended.stderr
        running = read_record(tmp_path / "cache")
        assert running is not None and running.pid == node.pid
        assert kvell("cluster", "down").code == 0
        assert node.process is not None and node.process.wait(20) == -15
        assert read_record(tmp_path / "cache") is None
        assert not Path(running.folder).exists()

    def test_a_second_one_is_refused(self, kvell: Kvell, nodes: list[FakeNode]) -> None:
        kvell("cluster", "up")
        ended = kvell("cluster", "up")
        assert ended.code == 2 and len(nodes) == 1
        assert f"runs on this machine already (pid {nodes[0].pid})" in ended.stderr

    def test_one_joins_and_says_so_in_json(
        self, kvell: Kvell, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        ended = kvell("cluster", "up", "--join", "10.0.0.5:6379", "--json")
        [node] = nodes
        assert json.loads(ended.stdout) == {"address": "10.0.0.5:6379", "pid": node.pid}
        assert node.settings.joins == "10.0.0.5:6379"
        assert "reaches Ray can" not in ended.stderr

    def test_with_nothing_there_down_says_so(self, kvell: Kvell, tmp_path: Path) -> None:
        ended = kvell("cluster", "down")
        assert ended.code == 0
        assert "no Ray of kvell cluster up runs on this machine" in ended.stderr

    def test_down_spares_a_process_that_has_the_number_now(
        self, kvell: Kvell, tmp_path: Path
    ) -> None:
        with subprocess.Popen(["sleep", "60"]) as child:
            NodeRecord(child.pid, 1, "10.0.0.1:6379", "/nowhere").save(tmp_path / "cache")
            assert kvell("cluster", "down").code == 0
            assert child.poll() is None
            child.kill()


class TestStatus:
    def test_no_ray_there_is_said(self, kvell: Kvell) -> None:
        pytest.importorskip("ray")
        ended = kvell("cluster", "status", "--cluster", "127.0.0.1:9")
        assert ended.code == 2
        assert "--cluster=127.0.0.1:9: no Ray answers there" in ended.stderr

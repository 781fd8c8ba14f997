"""A launcher and its child: the secret on stdin, one child at a time, and no child without it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvell.cluster.steering.epochs import Leadership
from kvell.fleet.placing.launcher import LAST_LINES, Launcher
from kvell.fleet.placing.placement import IncarnationEnd, InstancePlace
from kvell.mempool.rendezvous import SECRET_BYTES
from tests.front.scenarios import is_gone

SECRET = bytes(range(SECRET_BYTES))
PATIENCE_SECONDS = 20.0
WRITES = (
    "import sys, pathlib; s = sys.stdin.buffer.read(32); pathlib.Path(sys.argv[1]).write_bytes(s)"
)
LISTENS = "print('tcp://10.0.0.7:5', flush=True)"
STAYS = f"{WRITES}; {LISTENS}; sys.stdin.buffer.read()"


def program(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


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

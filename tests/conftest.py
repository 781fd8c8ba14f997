"""What tests of several rooms share: depth, order and cost of a run, and the packaged model."""

import asyncio
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from kvell.models.sources.packaged import packaged_model
from tests.budget import LISTED, Costs, file_of, group_of, listed_shares, longest_first
from tests.depth import DEFAULT, set_depth, some
from tests.server.metrics.exported import Exported, exported_by_a_server
from tests.shallow_model import write_shallow

SCENARIO_SECONDS = 120.0
os.environ.setdefault("TRITON_INTERPRET", "1")  # read where Triton is first imported
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables in pipes follow it
# Each client reads all certificates of this machine, which takes 80 ms; tests trust none of them.
transports: Any = httpx._transports.default
transports.create_ssl_context = functools.cache(transports.create_ssl_context)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--depth", type=float, default=DEFAULT, help="scale of the examples of property tests"
    )
    parser.addoption(
        "--screenshots", type=Path, help="folder for screenshots of the memory map, docs/images"
    )
    parser.addoption(
        "--budget", action="store_true", help="fail if a test takes more than its share of time"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the depth before test modules read it; a busy machine is slow, so no deadline."""
    set_depth(config.getoption("depth"))
    settings.register_profile("kvell", some())
    settings.load_profile("kvell")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CostReport(is_bound=config.getoption("budget")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    order = longest_first([item.nodeid for item in items], listed_shares(LISTED.read_text()))
    items[:] = [items[i] for i in order]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, which fails if it takes longer than two minutes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def bounded() -> None:
        async with asyncio.timeout(SCENARIO_SECONDS):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    asyncio.run(bounded())
    return True


class FilesAndGroups(LoadScopeScheduling):  # type: ignore[misc] # xdist is untyped
    """Tests of files of one ``xdist_group`` run in one worker, and so do those of any other file.

    The group is read from the file: pytest 9.2 has no node ids that xdist 3.8 could add it to.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / file_of(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndGroups | None:
    """Share what fixtures of a module and of a group make, with ``--dist loadgroup``."""
    return FilesAndGroups(config, log) if config.getoption("dist") == "loadgroup" else None


class CostReport:
    """Tells what tests cost, and makes a run fail in which one took more than its share."""

    def __init__(self, is_bound: bool) -> None:
        self._is_bound = is_bound
        self._costs = Costs()
        self._too_slow: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._costs.add(report.nodeid, report.duration, is_around=report.when != "call")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run that passed otherwise."""
        if self._is_bound and exitstatus == pytest.ExitCode.OK:
            self._too_slow = list(self._costs.too_slow(listed_shares(LISTED.read_text())))
            if self._too_slow:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._is_bound:
            return
        terminalreporter.section(f"slowest files, of {self._costs.total_seconds:.0f} s")
        for file, seconds in self._costs.slowest_files(20):
            terminalreporter.line(f"{seconds:7.1f} s  {file}")
        for line in self._too_slow:
            terminalreporter.line(line, red=True)


FAKE_INSTANCE = Path(__file__).parent / "fleet" / "fake_instance.py"


@pytest.fixture
def instance_command() -> Callable[..., list[str]]:
    """Command line of a fake instance with further arguments."""

    def command(*arguments: str) -> list[str]:
        script = str(FAKE_INSTANCE)
        fixed = ["--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}"]
        return [sys.executable, script, *fixed, *arguments]

    return command


@pytest.fixture(autouse=True, scope="session")
def no_weight_cache() -> Iterator[None]:
    """Keep models of tests out of the user's cache; tests of the cache make their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvell.engine.opened.WeightCache", lambda *_: None)
        yield


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("kvell-weights")
    yield made
    os.close(made)


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    mkdir: Callable[[str], Path] = request.config.cache.mkdir
    return packaged_model(mkdir("smollm2"))


@pytest.fixture(scope="session")
def shallow_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow(smollm2_path, tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="session")
def exported(shallow_path: Path) -> Exported:
    """What a real server's ``/metrics`` shows."""
    return exported_by_a_server(shallow_path.parent)

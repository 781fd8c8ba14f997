"""Where results of cells are kept, and when they still hold."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.managers import matrix
from bench.managers.cells import OURS, SHAPES, Cell, cells, memory_bytes
from bench.managers.matrix import Setting, found, missing, report, stale
from bench.managers.results import read, written
from bench.managers.store import DECIDING, DRIVING, PACKING, Store, fingerprint
from bench.managers.verdicts import verdicts
from bench.replay.shapes import read_shape
from tests.managers.outcomes import PLACE, compared, ran, refused
from tests.simulator.replays import row

CELL = Cell("gpt-oss-20b", "azure-2023-code", 8, "kvell")
THEIRS = Cell(*CELL.place, "vllm")


def core(path: Path, text: str) -> Path:
    """A repository whose core is this text."""
    (path / "csrc" / "memory").mkdir(parents=True, exist_ok=True)
    (path / "csrc" / "memory" / "core.cpp").write_text(text)
    return path


def committed(path: Path, outcomes: dict[Cell, dict[str, Any]]) -> Path:
    """A file of results as a matrix that was run whole left it."""
    path.write_text(written(outcomes, [], []))
    return path


class TestStore:
    def test_what_is_kept_is_found(self, tmp_path: Path) -> None:
        store = Store(tmp_path, tmp_path / "cache")
        kept = store.put(CELL, 100, {"steps": 3})
        assert store.get(CELL) == store.get(CELL, 100) == kept
        assert kept["steps"] == 3

    def test_not_for_another_memory_size(self, tmp_path: Path) -> None:
        store = Store(tmp_path, tmp_path / "cache")
        store.put(CELL, 100, {"steps": 3})
        assert store.get(CELL, 101) is None

    def test_not_once_the_core_has_changed(self, tmp_path: Path) -> None:
        Store(core(tmp_path, "old"), tmp_path / "cache").put(CELL, 1, {"steps": 3})
        assert Store(tmp_path, tmp_path / "cache").get(CELL) is not None
        assert Store(core(tmp_path, "new"), tmp_path / "cache").get(CELL) is None

    def test_vllms_cells_do_not_depend_on_our_core(self, tmp_path: Path) -> None:
        Store(core(tmp_path, "old"), tmp_path / "cache").put(THEIRS, 1, {"steps": 3})
        assert Store(core(tmp_path, "new"), tmp_path / "cache").get(THEIRS) is not None

    @pytest.mark.parametrize(("config", "holds"), [(CELL.shape, False), ("another", True)])
    def test_a_cell_depends_on_the_config_of_its_shape_alone(
        self, tmp_path: Path, config: str, holds: bool
    ) -> None:
        for cell in (CELL, THEIRS):
            Store(tmp_path, tmp_path / "cache").put(cell, 1, {"steps": 3})
        (tmp_path / "bench" / "configs").mkdir(parents=True)
        (tmp_path / "bench" / "configs" / f"{config}.json").write_text("{}")
        after = Store(tmp_path, tmp_path / "cache")
        assert [after.get(cell) is not None for cell in (CELL, THEIRS)] == [holds, holds]

    def test_fewer_requests_are_other_cells(self, tmp_path: Path) -> None:
        Store(tmp_path, tmp_path / "cache", requests=60).put(CELL, 1, {"steps": 3})
        assert Store(tmp_path, tmp_path / "cache").get(CELL) is None

    def test_a_broken_file_is_no_result(self, tmp_path: Path) -> None:
        store = Store(tmp_path, tmp_path / "cache")
        store.put(CELL, 1, {"steps": 3})
        store.path(CELL).write_text("{")
        assert store.get(CELL) is None

    def test_names_count_in_the_fingerprint(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("1")
        before = fingerprint(tmp_path, ["*.py"])
        (tmp_path / "a.py").rename(tmp_path / "b.py")
        assert fingerprint(tmp_path, ["*.py"]) != before


class TestCommitted:
    """A fresh checkout has no cache, but the committed file."""

    def test_a_cell_of_the_same_sources_is_found(self, tmp_path: Path) -> None:
        sources = Store(tmp_path).sources(CELL)
        file = committed(tmp_path / "file", {CELL: ran(7, sources=sources)})
        store = Store(tmp_path, tmp_path / "cache", committed=file)
        assert store.get(CELL, 1 << 30) == store.last(CELL)
        assert (store.get(CELL) or {})["steps"] == 7
        assert store.get(CELL, 1 << 20) is None

    def test_of_other_sources_only_what_was_there_last(self, tmp_path: Path) -> None:
        old, theirs = Store(core(tmp_path, "old")).sources(CELL), Store(tmp_path).sources(THEIRS)
        both = {CELL: ran(7, sources=old), THEIRS: ran(8, sources=theirs)}
        file = committed(tmp_path / "file", both)
        store = Store(core(tmp_path, "new"), tmp_path / "cache", committed=file)
        assert store.get(CELL) is None
        assert (store.last(CELL) or {})["steps"] == 7
        assert (store.get(THEIRS) or {})["steps"] == 8
        assert stale(store, found(store, both)) == [CELL]

    def test_what_was_run_since_counts_more(self, tmp_path: Path) -> None:
        file = committed(tmp_path / "file", {CELL: ran(7, sources=Store(tmp_path).sources(CELL))})
        store = Store(tmp_path, tmp_path / "cache", committed=file)
        store.put(CELL, 1 << 30, {"steps": 3})
        assert (store.get(CELL) or {})["steps"] == 3

    def test_without_a_file_there_is_nothing(self, tmp_path: Path) -> None:
        assert Store(tmp_path, tmp_path / "cache", committed=tmp_path / "none").last(CELL) is None


class TestMissing:
    def setting(self, path: Path, vllm: Path | None = None) -> Setting:
        lines = [{"arrival_s": i, "prompt_tokens": 20, "output_tokens": 2} for i in range(3)]
        trace = path / f"{CELL.trace}.jsonl.gz"
        trace.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
        return Setting(path, 2, vllm)

    def test_only_what_is_missing_is_run(self, tmp_path: Path) -> None:
        setting, store = self.setting(tmp_path), Store(tmp_path, tmp_path / "cache")
        asked = [CELL, Cell(*CELL.place, "paged")]
        assert list(missing(setting, store, asked)) == asked
        memory = memory_bytes(read_shape(CELL.shape), [row(20, 2)], CELL.size)
        store.put(CELL, memory, {"steps": 3})
        assert list(missing(setting, store, asked)) == asked[1:]

    def test_without_its_environment_vllm_is_not_run(self, tmp_path: Path) -> None:
        store = Store(tmp_path, tmp_path / "cache")
        assert list(missing(self.setting(tmp_path), store, [CELL, THEIRS])) == [CELL]
        ready = self.setting(tmp_path, tmp_path)
        assert list(missing(ready, store, [CELL, THEIRS])) == [CELL, THEIRS]


class TestFile:
    def test_has_a_line_for_each_cell(self) -> None:
        one = compared(static=refused("no room"))
        results = {Cell(*one.place, name): dict(found) for name, found in one.outcomes.items()}
        text = written(results, [one], verdicts([one]))
        told = json.loads(text)
        assert told["cells"] == len(told["by_cell"]) == 5
        assert told["by_cell"]["gemma3-27b.azure-2023-conv.8.static"]["refused"] == "no room"
        figures = told["by_cell"]["gemma3-27b.azure-2023-conv.8.kvell"]
        assert dict(zip(told["figures"], figures, strict=True))["steps"] == 100
        assert sum(line.startswith(' "gemma3') for line in text.splitlines()) == 5

    def test_what_is_read_is_judged_as_what_was_written(self, tmp_path: Path) -> None:
        one = compared(
            kvell=ran(102, hit_rate=0.0951), paged=refused("no room"), jenga=ran(requests_refused=2)
        )
        results = {Cell(*one.place, name): dict(found) for name, found in one.outcomes.items()}
        again = read(committed(tmp_path / "file", results))
        outcomes = {cell.manager: again[cell.name] for cell in results}
        assert verdicts([type(one)(one.place, one.kinds, outcomes)]) == verdicts([one])

    def test_a_manager_without_decisions_has_none_again(self, tmp_path: Path) -> None:
        theirs = ran()
        del theirs["decisions"]
        assert "decisions" not in read(committed(tmp_path / "file", {THEIRS: theirs}))[THEIRS.name]

    def test_the_whole_matrix_is_small_enough_to_commit(self, tmp_path: Path) -> None:
        one = ran(123456, batch_mean=123.456789, hit_rate=0.123456789, decisions="0" * 16)
        text = written(dict.fromkeys(cells(), one), [], [])
        assert len(text) < 1 << 20

    def test_a_file_that_is_none_has_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("{")
        assert read(tmp_path / "file") == read(tmp_path / "none") == {}


class TestReport:
    def test_filters_choose_what_is_judged_and_the_file_keeps_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Store(tmp_path, tmp_path / "cache")
        other = (SHAPES[0], *PLACE[1:])
        for place, steps in ((PLACE, 100), (other, 200)):
            for manager in OURS:
                slow = steps if manager == "kvell" else 100
                store.put(Cell(*place, manager), 1, ran(slow))
        out = tmp_path / "out.json"
        monkeypatch.setattr(matrix, "verdicts", lambda one: verdicts(one)[:2])
        assert report(store, list(cells(shapes=[PLACE[0]])), out)
        assert not report(store, list(cells()), out)
        assert "2.0000 × " in capsys.readouterr().out
        assert len(read(out)) == 2 * len(OURS)

    def test_what_was_measured_with_other_sources_is_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = {Cell(*PLACE, manager): ran(sources="old") for manager in OURS}
        file = committed(tmp_path / "file", before)
        store = Store(tmp_path, tmp_path / "cache", committed=file)
        store.put(Cell(*PLACE, "kvell"), 1, ran())
        report(store, list(cells()), file)
        assert "4 of 5 cells" in capsys.readouterr().out
        assert json.loads(file.read_text())["cells_of_other_sources"] == 4
        assert {one["sources"] for one in read(file).values()} > {"old"}


@pytest.mark.parametrize("pattern", sorted({*DECIDING, *PACKING, *DRIVING}))
def test_patterns_follow_the_sources(pattern: str) -> None:
    assert any(Path().glob(pattern.format(shape="llama3-8b"))), "a module was moved"

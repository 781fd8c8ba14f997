"""Result files: each records its run, lies in its machine's folder, and has a reader."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import result_file
from bench.cost.arch_level import PrefillPoint, fit_arch_level
from bench.result_file import (
    FIELDS,
    RESULTS,
    VIRTUAL,
    RowFile,
    path_of,
    processor_name,
    read,
    slug,
    write,
)

READERS = ("README.md", "CHANGELOG.md", "docs", "bench", "scripts", "tests")
FILES = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json"))
OPTIONAL = re.compile(r"\[(_\w+)\]")
"""A command of two files names both at once: ``seams[_ahead].json``."""
AMD = {"vendor_id": "AuthenticAMD", "model name": "AMD EPYC", "cpu family": "25", "model": "17"}
INTEL = {"vendor_id": "GenuineIntel", "model name": "Intel(R) Xeon(R)", "flags": "avx2 avx512f"}


@cache
def readers() -> str:
    """Return all documents and sources, with and without optional parts of names."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in reading_files())
    return OPTIONAL.sub("", text) + "\n" + OPTIONAL.sub(r"\1", text)


def reading_files() -> Iterator[Path]:
    for name in READERS:
        root = Path(name)
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            is_text = path.suffix in {".md", ".py"} or path.parent.name == "scripts"
            if path.is_file() and is_text:
                yield path


def run_of(name: str) -> dict[str, Any]:
    told: dict[str, Any] = read(RESULTS / name)["run"]
    return told


@pytest.mark.parametrize("name", FILES)
def test_a_file_records_its_run(name: str) -> None:
    run = run_of(name)
    assert all(run[field] for field in FIELDS)
    assert "dirty" not in run["commit"], "its tree had changes that no commit has"
    assert "note" not in run


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named_in_a_document_or_source(name: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(name)}", readers()), "nobody reads it: delete it"


def test_files_lie_by_machine() -> None:
    assert FILES
    assert {name.count("/") for name in FILES} == {1}
    virtual = {name for name in FILES if name.startswith(f"{VIRTUAL}/")}
    assert virtual == {name for name in FILES if run_of(name)["processor"] == VIRTUAL}


def test_what_is_written_records_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", "-m", "bench.x", "--json", "a b"])
    file = tmp_path / "new" / "x.json"
    write(file, [1, 2])
    written = json.loads(file.read_text())
    assert written["figures"] == [1, 2]
    assert written["run"]["command"] == "python -m bench.x --json 'a b'"
    write(file, {"rate": 1.5}, processor=VIRTUAL)
    written = json.loads(file.read_text())
    assert written.pop("run")["processor"] == VIRTUAL
    assert written == {"rate": 1.5}


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    file = RowFile(path, processor="a GPU")
    assert read(path)["rows"] == []
    for count in (1, 2):
        file.add({"rate": count})
        assert len(path.read_text().splitlines()) == 1 + count
        assert read(path)["rows"][-1] == {"rate": count}
    assert read(path)["run"]["processor"] == "a GPU"
    RowFile(path)
    assert read(path)["rows"] == [], "a new run begins anew"


def test_a_file_of_one_object_is_read_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "x.json", {"rate": 1.5, "figures": [1]})
    assert {name: read(tmp_path / "x.json")[name] for name in ("rate", "figures")} == {
        "rate": 1.5,
        "figures": [1],
    }


def test_without_git_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_file, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert result_file.run()["commit"] is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (AMD, "zen4"),
        (AMD | {"model": "1"}, "zen3"),
        (AMD | {"cpu family": "26", "model": "2"}, "zen5"),
        (INTEL, "xeon"),
        (INTEL | {"flags": "avx512f amx_tile"}, "amx"),
        (INTEL | {"flags": "avx2", "model name": "Intel(R) Core i5"}, "intel_r_core_i5"),
    ],
)
def test_a_machine_has_a_short_name(facts: dict[str, str], expected: str) -> None:
    assert slug(facts) == expected


def test_a_processor_is_named_with_family_and_model() -> None:
    assert processor_name(AMD) == "AMD EPYC (family 25, model 17)"
    assert processor_name({}), "there is always a name"


def test_a_result_goes_to_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_file, "processor_facts", lambda: AMD)
    assert path_of("seams") == RESULTS / "zen4" / "seams.json"
    assert path_of("hits", VIRTUAL) == RESULTS / "virtual" / "hits.json"


def test_a_polynomial_is_found() -> None:
    points = [
        PrefillPoint(x, y, 0.01 + 1e-4 * x - 5e-5 * x * y + 1e-7 * x * x)
        for x in (100, 500, 1000, 2000)
        for y in (0.0, 0.3, 0.6, 0.9)
    ]
    found = fit_arch_level(points)
    for point in points:
        predicted = found.prefill_seconds(point.prompt_tokens, point.cached_ratio)
        assert predicted == pytest.approx(point.seconds, rel=1e-6)


def test_too_few_points() -> None:
    with pytest.raises(ValueError, match="6 coefficients"):
        fit_arch_level([PrefillPoint(1, 0.0, 1.0)])

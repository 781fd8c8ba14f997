"""What belongs to the packages is in them, and nothing else is."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.packages.contents import (
    ADDED_TO_WHEELS,
    FILES,
    compiled_parts,
    sdist_files,
    sdist_problems,
    source_files,
    wheel_files,
    wheel_problems,
)
from tests.packaging.conftest import Built
from tests.packaging.written import ROOT

pytestmark = pytest.mark.xdist_group("built")

ENDING = ".cpython-311-x86_64-linux-gnu.so"
SOURCES = {
    *FILES,
    "bench/configs/README.md",
    "bench/configs/large/a.json",
    "csrc/memory/core.cpp",
    "src/kvell/py.typed",
    "src/kvell/prefix/_core.pyi",
    "src/kvell/server/map/static/map.css",
}
WHEEL = {
    "kvell/configs/large/a.json",
    "kvell/py.typed",
    "kvell/prefix/_core.pyi",
    f"kvell/prefix/_core{ENDING}",
    "kvell/server/map/static/map.css",
    *(f"kvell-1.dist-info/{name}" for name in ADDED_TO_WHEELS),
}


def tree(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


def test_sources_are_three_folders_without_what_a_build_leaves(tmp_path: Path) -> None:
    junk = ["src/kvell/__pycache__/a.pyc", "src/kvell/_core.so", "tests/a.py", "src/other/a.py"]
    kept = ["bench/configs/a.json", "csrc/a/b.cpp", "src/kvell/a.py", "src/kvell/map/a.css"]
    assert source_files(tree(tmp_path, *junk, *kept)) == {*FILES, *kept}


def test_a_complete_sdist_has_no_problem() -> None:
    assert sdist_problems({*SOURCES, "PKG-INFO"}, SOURCES) == []


@pytest.mark.parametrize(
    ("added", "removed", "problem"),
    [
        (set(), {"src/kvell/py.typed"}, "missing: src/kvell/py.typed"),
        (set(), {"PKG-INFO"}, "missing: PKG-INFO"),
        ({"tests/a.py"}, set(), "does not belong there: tests/a.py"),
    ],
)
def test_what_differs_in_an_sdist_is_named(
    added: set[str], removed: set[str], problem: str
) -> None:
    assert sdist_problems({*SOURCES, "PKG-INFO", *added} - removed, SOURCES) == [problem]


@pytest.mark.parametrize("path", ["src/kvell/a.py.orig", "csrc/core", "csrc/.a.cpp.swp"])
def test_junk_among_the_sources_is_named(path: str) -> None:
    sources = {*SOURCES, path}
    assert sdist_problems({*sources, "PKG-INFO"}, sources) == [f"of no known kind: {path}"]


def test_a_complete_wheel_has_no_problem() -> None:
    assert wheel_problems(WHEEL, SOURCES, ENDING) == []


@pytest.mark.parametrize(
    ("added", "removed", "problem"),
    [
        (set(), {f"kvell/prefix/_core{ENDING}"}, f"missing: kvell/prefix/_core{ENDING}"),
        (set(), {"kvell/server/map/static/map.css"}, "missing: kvell/server/map/static/map.css"),
        (set(), {"kvell-1.dist-info/RECORD"}, "missing: kvell-1.dist-info/RECORD"),
        (set(), {"kvell/configs/large/a.json"}, "missing: kvell/configs/large/a.json"),
        ({"kvell/a.so"}, set(), "does not belong there: kvell/a.so"),
        ({"csrc/memory/core.cpp"}, set(), "does not belong there: csrc/memory/core.cpp"),
    ],
)
def test_what_differs_in_a_wheel_is_named(added: set[str], removed: set[str], problem: str) -> None:
    assert wheel_problems({*WHEEL, *added} - removed, SOURCES, ENDING) == [problem]


def test_a_wheel_has_one_folder_about_itself() -> None:
    bare = {path for path in WHEEL if ".dist-info/" not in path}
    assert wheel_problems(bare, SOURCES, ENDING) == ["0 folders .dist-info"]


def test_a_wheel_built_without_a_compiler_has_no_compiled_parts() -> None:
    built = ["kvell/configs/large/a.json", f"kvell/prefix/_core{ENDING}"]
    assert wheel_problems(WHEEL - set(built), SOURCES, "") == []
    assert wheel_problems(WHEEL, SOURCES, "") == [f"does not belong there: {x}" for x in built]


def test_archives_are_read_below_their_folder(tmp_path: Path) -> None:
    file = tree(tmp_path, "a") / "a"
    with tarfile.open(tmp_path / "k-1.tar.gz", "w:gz") as sdist:
        sdist.add(file, "k-1/csrc/a")
    with zipfile.ZipFile(tmp_path / "k.whl", "w") as wheel:
        wheel.writestr("k/", "")
        wheel.write(file, "k/a")
    assert sdist_files(tmp_path / "k-1.tar.gz") == {"csrc/a"}
    assert wheel_files(tmp_path / "k.whl") == {"k/a"}


def test_every_compiled_module_has_a_stub_by_which_it_is_found() -> None:
    """So a module that CMake installs is one that the wheel is searched for."""
    targets = {
        f"{words[1].split(')')[0]}/{words[0]}"
        for path in (ROOT / "csrc").rglob("CMakeLists.txt")
        for line in path.read_text().splitlines()
        if line.startswith(("kvell_add_extension(", "kvell_add_module(", "kvell_add_kernels("))
        and (words := line.partition("(")[2].split())
    }
    assert len(targets) >= 7
    assert targets == set(compiled_parts(source_files(ROOT)))


def test_this_tree_makes_a_complete_sdist(built: Built) -> None:
    held = sdist_files(built.place.sdist)
    assert held == built.sources
    assert sdist_problems(held, source_files(ROOT)) == []


def test_its_wheel_has_the_whole_package(built: Built) -> None:
    held = wheel_files(built.place.wheel)
    assert wheel_problems(held, built.sources, "") == []
    assert {"kvell/server/map/static/map.html", "kvell/simulator/hardware/data/h100.toml"} <= held

"""The check of a GPU runs with what such a machine has, and with the wheels that are carried."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from bench.gpu import wheels
from bench.gpu.check import PROBE, STAGES
from bench.gpu.installing import SOURCE, installed
from bench.gpu.wheels import (
    REPOSITORY,
    can_build,
    compiled_line,
    expected_packages,
    find_python,
    has_kvell,
    missing_packages,
    native_hash,
    pinned_versions,
    size_problem,
    wheel_requirements,
)
from bench.result_file import read
from tests.bench.wheels import carried

REMOVED = {"asynchat", "asyncore", "distutils", "imp", "smtpd"}
"""Of the standard library, in Python 3.12."""
OURS = {"bench", "tests", "kvell", "_editable_skbc_kvell", "sitecustomize"}
BLOCK = """
import sys
from importlib.machinery import PathFinder

ALLOWED = {allowed!r}

class Expected(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name not in ALLOWED and not name.startswith("_sysconfigdata"):
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [Expected if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Every process runs it at its start: packages that are not allowed cannot be found."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    packages = expected_packages() | set(carried()) | {"kvell"}
    modules = {
        module
        for module, names in packages_distributions().items()
        if packages & {canonicalize_name(name) for name in names}
    }
    allowed = sorted(modules | (set(sys.stdlib_module_names) - REMOVED) | OURS)
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(allowed=allowed))
    path = os.pathsep.join([str(tmp_path), "src", "."])
    variables = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **variables}


def run(environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


def test_every_stage_imports_no_other_package(environment: dict[str, str]) -> None:
    modules = {each.run.partition(":")[0] for each in (PROBE, *STAGES)}
    script = f"import bench.gpu.check, {', '.join(sorted(modules))}"
    done = run(environment, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("package", ["openai", "sphinx", "imp"])
def test_another_package_would_be_noticed(package: str, environment: dict[str, str]) -> None:
    for script in (f"import {package}", f"import hypothesis, {package}.more"):
        done = run(environment, sys.executable, "-c", script)
        assert f"No module named '{package}'" in done.stderr


@pytest.mark.parametrize(
    "only", [["--only", "machine,engine"], pytest.param([], marks=pytest.mark.long)], ids=str
)
def test_a_pretended_run_ends_well(
    only: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "gpu.json"
    command = [str(REPOSITORY / "scripts" / "gpu_check"), "--pretend", "--workers", "2"]
    command += ["--seconds", "800", "--out", str(out), *only]
    done = run(environment | {"PYTHON": sys.executable}, *command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = read(out)["rows"]
    assert all(row["pretended"] and row.get("ok", True) for row in rows)
    ended = [row["stage"] for row in rows if "ended" in row]
    assert ended == (only[1].split(",") if only else [each.name for each in STAGES])
    assert all(row["rows"] for row in rows if "ended" in row)
    assert out.with_suffix(".txt").read_text() in done.stdout


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    info = f"{name}-1.dist-info"
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        for path, text in (*files.items(), (f"{info}/RECORD", record)):
            archive.writestr(path, text)


def test_wheels_are_there_for_one_run_with_this_trees_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    write_wheel(tmp_path, "kvell", {"kvell/errors.py": "old = 1\n", "kvell/_part.so": "compiled"})
    write_wheel(tmp_path, "other", {"other.py": "answer = 42\n"})
    with installed(tmp_path):
        folder, before = os.environ["PYTHONPATH"].split(os.pathsep)
        assert before == "before"
        assert (Path(folder) / "other.py").read_text() == "answer = 42\n"
        assert (Path(folder) / "kvell/_part.so").read_text() == "compiled"
        ours = (SOURCE / "errors.py").read_text()
        assert (Path(folder) / "kvell/errors.py").read_text() == ours
    assert os.environ["PYTHONPATH"] == "before"
    assert not Path(folder).exists()


def test_without_wheels_nothing_is_installed(tmp_path: Path) -> None:
    before = os.environ.get("PYTHONPATH")
    with installed(None):
        assert os.environ.get("PYTHONPATH") == before
    with pytest.raises(SystemExit, match="run scripts/device_wheels"), installed(tmp_path):
        pass


NEEDS = {
    "a": ["b>=1", "c"],
    "b": ["d; python_version < '3.12'", "e; sys_platform == 'win32'", "f; extra == 'more'"],
    "c": ["a", "G_g"],
    "g-g": [],
}


def test_all_that_is_needed_is_missing_but_for_what_is_expected() -> None:
    assert missing_packages(["a", "torch"], {"torch"}, NEEDS.__getitem__) == ["a", "b", "c", "g-g"]
    assert missing_packages(["a", "torch"], {"torch", "c"}, NEEDS.__getitem__) == ["a", "b"]


def test_extras_are_not_followed_silently() -> None:
    with pytest.raises(ValueError, match="name their packages"):
        missing_packages(["a[more]"], set(), NEEDS.__getitem__)


def test_wheels_are_those_of_all_dependencies_and_pinned() -> None:
    names = carried()
    assert {"msgspec", "llguidance", "pydantic", "pydantic-core", "httpcore2"} <= set(names)
    assert not {"torch", "triton", "transformers", "numpy"} & set(names)
    assert set(names) <= set(pinned_versions())


def test_a_wheel_says_what_it_needs_and_where_it_runs(tmp_path: Path) -> None:
    wheel = tmp_path / "kvell-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvell-1.dist-info/METADATA", "Name: kvell\nRequires-Dist: a>=1\n\nText\n")
        archive.writestr("kvell/vendored/METADATA", "Requires-Dist: other\n")
    assert wheel_requirements(wheel) == ["a>=1"]
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("kvell/_a.so", b"\0GLIBC_2.4\0GLIBC_2.34\0")
    assert compiled_line(wheel) == "its compiled parts need glibc 2.34"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("kvell/_b.so", b"\0GLIBC_2.40\0")
    assert "too new" in compiled_line(wheel)


def test_only_a_python_of_the_wheels_version_builds(tmp_path: Path) -> None:
    fitting, other = tmp_path / "fitting", tmp_path / "other"
    for path, answer in ((fitting, "3.12 True"), (other, "3.12 False")):
        path.write_text(f"#!/bin/sh\necho {answer}\n")
        path.chmod(0o755)
    assert can_build(fitting)
    assert find_python(fitting) == fitting
    assert find_python(other) is None
    assert find_python(tmp_path / "missing") is None


def test_kvell_is_built_again_when_compiled_parts_change(tmp_path: Path) -> None:
    repository, folder = tmp_path / "tree", tmp_path / "wheels"
    (repository / "csrc").mkdir(parents=True)
    for name in ("CMakeLists.txt", "constraints.txt", "pyproject.toml", "csrc/a.cpp"):
        (repository / name).write_text(name)
    before = native_hash(repository)
    assert native_hash(repository) == before
    (repository / "csrc/a.cpp").write_text("changed")
    assert native_hash(repository) != before
    folder.mkdir()
    (folder / "kvell.sha256").write_text(native_hash())
    assert not has_kvell(folder), "there is no wheel"
    (folder / "kvell-1-cp312-cp312-linux_x86_64.whl").touch()
    assert has_kvell(folder)
    (folder / "kvell.sha256").write_text(before)
    assert not has_kvell(folder)


def test_what_is_too_large_to_send_is_refused() -> None:
    assert size_problem(10, 20, most=31) is None
    problem = size_problem(40 << 20, 8 << 20)
    assert problem == "tree 40.0 MiB and wheels 8.0 MiB are too large; keep them below 48.0 MiB"
    assert 1 << 20 < wheels.tree_bytes() < wheels.MOST_BYTES

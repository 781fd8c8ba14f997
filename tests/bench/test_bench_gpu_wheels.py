"""What travels to a machine with a GPU: complete, pinned, and small enough."""

import zipfile
from pathlib import Path

import pytest

from bench.gpu import wheels
from bench.gpu.wheels import (
    can_build,
    compiled_line,
    find_python,
    has_kvell,
    missing_packages,
    native_hash,
    pinned_versions,
    size_problem,
    wheel_requirements,
)
from tests.bench.wheels import carried

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

"""What Kvell imports is declared: a base install, or the extra that a feature names, has it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GPU_ONLY = {"triton"}
"""Comes with torch where torch has a GPU."""


def imported_packages(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: Mapping[str, list[str]] = project["optional-dependencies"]
    of_features = (one for name, extra in extras.items() if name != "dev" for one in extra)
    wanted = [*project["dependencies"], *of_features]
    return {normal(re.split(r"[=<>;\[]", one)[0]) for one in wanted}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip()


FILES = sorted((ROOT / "src" / "kvell").rglob("*.py"))


def test_every_import_is_declared() -> None:
    distributions = packages_distributions()
    outside = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in imported_packages(path.read_text())
        if name not in sys.stdlib_module_names and name not in {"kvell", *GPU_ONLY}
    }
    assert len({name for _, name in outside}) > 10
    missing = sorted(
        (path, name)
        for path, name in outside
        if not {normal(one) for one in distributions.get(name, [name])} & declared()
    )
    assert missing == []


@pytest.mark.parametrize("source", ["import a.b", "from a.b import c", "def f():\n  import a"])
def test_imports_are_found_wherever_they_stand(source: str) -> None:
    assert list(imported_packages(source)) == ["a"]

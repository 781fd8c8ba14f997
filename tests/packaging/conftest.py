"""The packages of this working tree, built without a compiler in about two seconds."""

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.packages.workplace import Workplace
from tests.packaging.written import ROOT

BUILD = """
import sys
from scikit_build_core.build import build_sdist, build_wheel
target, *settings = sys.argv[1:]
if settings:
    build_wheel(target, dict(one.split("=") for one in settings))
else:
    build_sdist(target)
"""
NO_COMPILER = "wheel.cmake=false"


class Built(NamedTuple):
    """A tree's packages, and its files as they were then."""

    place: Workplace
    sources: frozenset[str]


def build(folder: Path, target: Path, *settings: str) -> None:
    command = [sys.executable, "-c", BUILD, str(target), *settings]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of the working tree, and the wheel that is built from that sdist."""
    place = Workplace(ROOT, tmp_path_factory.mktemp("packages"))
    build(ROOT, place.built)
    with tarfile.open(place.sdist) as archive:
        archive.extractall(place.folder / "sources", filter="data")
    [sources] = (place.folder / "sources").iterdir()
    build(sources, place.built, NO_COMPILER)
    files = (path for path in sources.rglob("*") if path.is_file())
    return Built(place, frozenset(path.relative_to(sources).as_posix() for path in files))

"""Files that a README of a room or the architecture names are there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "kvell"
PAGES = [ROOT / "docs" / "architecture.md", *sorted(SOURCES.rglob("README.md"))]
PATH = re.compile(r"`([\w/]+\.py|[\w/]+/)`")
HEADING = re.compile(r"#+ ([\w/]+/)$")


def missing(page: str, folder: Path) -> list[str]:
    """Return the paths that a page names and that do not exist.

    A path begins at a folder that its heading or its line names, at the page's folder, at the
    sources or at the repository.
    """
    paths, base = [], folder
    for line in page.splitlines():
        if heading := HEADING.match(line):
            base = folder / heading[1]
        places = [base, folder, SOURCES, SOURCES.parent, ROOT]
        for path in PATH.findall(line):
            place = next((at / path for at in places if (at / path).exists()), None)
            if place is None:
                paths.append(path)
            else:
                places.append(place if place.is_dir() else place.parent)
    return paths


def test_a_missing_file_is_found() -> None:
    assert missing("`pages/sizing.py`, `layout.py` and `absent.py`", ROOT) == ["absent.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    assert missing(page.read_text(), page.parent) == []


def test_the_house_is_the_contract_of_imports() -> None:
    """CONTRIBUTING lists the layers of pyproject.toml, and the architecture describes each."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.split(" | ") for layer in contracts["contracts"][0]["layers"]]
    [house] = re.findall(r"(?:^    .*\n)+", (ROOT / "CONTRIBUTING.md").read_text(), re.M)[-1:]
    assert [one.split(", ") for one in " ".join(house.split()).split(" > ")] == layers
    [rooms] = re.findall(r"^\| room \|.*\n(?:\|.*\n)+", PAGES[0].read_text(), re.M)
    described = {name for row in rooms.splitlines() for name in named(row.split("|")[1])}
    assert {name for layer in layers for name in layer} <= described


def named(cell: str) -> list[str]:
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)]

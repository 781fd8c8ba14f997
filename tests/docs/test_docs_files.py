"""Files that a README of a room or the architecture names are there."""

import re
import tomllib
from pathlib import Path

import pytest

from kvell.models.families.families import family_names
from scripts.reference.families import MARKS, PAGE, with_families
from tests.docs.fences import DOCS
from tests.docs.tables import rows_under

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


def test_the_readme_lists_the_served_families() -> None:
    text = PAGE.read_text()
    assert with_families(text) == text, "run python -m scripts.reference.families"
    listed = MARKS.findall(text)[0].strip().rstrip(".").split(",")
    assert [name.strip() for name in listed] == family_names()


def test_ratios_are_those_of_their_figures() -> None:
    rows = rows_under((DOCS / "measured.md").read_text(), "question", "Kvell")
    assert len(rows) == 5
    for question, kvell, vllm, ratio, _ in rows:
        figures = [float(cell.replace(",", "")) for cell in (kvell, vllm)]
        assert f"{figures[0] / figures[1]:.2f}" == ratio, question


def test_the_readme_has_the_figures_of_measured() -> None:
    readme, measured = PAGE.read_text(), (DOCS / "measured.md").read_text()
    _, one, many, prompts = rows_under(readme, "Kvell / vLLM")[0]
    rows = {row[0]: f"{row[1]} / {row[2]}" for row in rows_under(measured, "question", "Kvell")}
    assert one == rows["output tokens/s, 1 request"]
    assert many == rows["output tokens/s, 32 requests"]
    assert prompts == rows["prompt tokens/s, 2,048 tokens"]

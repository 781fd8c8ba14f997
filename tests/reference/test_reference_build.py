"""Sphinx renders everything without a warning, and refuses what leads nowhere."""

import re
from html import unescape
from pathlib import Path, PurePosixPath

import pytest
from sphinx.cmd.build import build_main

from scripts.reference import build as building
from scripts.reference.build import build, write_source
from scripts.reference.python.pages import python_pages
from scripts.reference.rst import contents, heading, page, table

# Of sphinx-click and myst-parser, about what Sphinx 11 will not have any more.
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
CONFIGURATION = str(Path(building.__file__).parent)


def rendered(source: Path, output: Path, builder: str = "html") -> int:
    options = ["-q", "-W", "-E", "-b", builder, "-c", CONFIGURATION, "-d", f"{output}.doctrees"]
    return build_main([*options, str(source), str(output)])


def written(folder: Path, **pages: str) -> Path:
    folder.mkdir()
    for name, text in pages.items():
        ending = "md" if text.startswith("# ") else "rst"
        (folder / f"{name}.{ending}").write_text(text)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered site of three pages."""
    folder = tmp_path_factory.mktemp("small")
    index = page(
        heading("Small"),
        ".. click:: kvell.cli.serve:serve\n   :prog: kvell serve\n",
        table(("Name", "Text"), (1, 2), [("``a``", "one\n\ntwo")]),
        contents(["memory", "more"]),
    )
    memory = python_pages()[PurePosixPath("python/memory.rst")]
    more = "# More\n\n[back](index.rst)\n"
    source = written(folder / "source", index=index, memory=memory, more=more)
    options = ["-q", "-E", "-b", "html", "-c", CONFIGURATION, str(source), str(folder / "out")]
    assert build_main(options) == 0
    return folder / "out"


def shown(page: Path) -> str:
    text = re.sub(r"<[^>]+>", "", page.read_text())
    return re.sub(r"\s+", " ", unescape(text))


def test_a_signature_shows_what_is_returned_and_types_stand_beside_parameters(small: Path) -> None:
    text = shown(small / "memory.html")
    assert "register(core, model, layers) → tuple[GroupSpec, ...]¶" in text
    assert "model (str) – a name that no group of the pool has" in text
    assert "layers (Sequence[LayerSpec])" in text


def test_an_alias_is_shown_by_its_name(small: Path) -> None:
    text = shown(small / "memory.html")
    assert "tokens (Tokens) – the request" in text
    assert "type Tokens = NDArray[int32]¶ Token ids, int32 [tokens]" in text


def test_options_are_shown_with_default_range_and_value(small: Path) -> None:
    text = shown(small / "index.html")
    assert "--port <port>" in text
    assert "Port to listen on; 0 takes a free one. Default: 8000 Range: 0<=x<=65535" in text
    assert "--model <[NAME=]MODEL>" in text


def test_pages_need_nothing_from_the_network(small: Path) -> None:
    asked = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    found = [one for path in small.rglob("*.html") for one in asked.findall(path.read_text())]
    styles = [path.read_text() for path in small.rglob("*.css")]
    assert styles
    assert found == []
    assert not any(re.search(r"@import|url\(\"?(?:https?:)?//", text) for text in styles)


@pytest.mark.parametrize(
    "text",
    [
        "# A link\n\n[nowhere](missing.md)\n",
        "# A place\n\n[nowhere](#not-there)\n",
        heading("A class") + "\n:class:`kvell.Nothing`\n",
        heading("A method") + "\n:meth:`kvell.memory.MemoryCore.nothing`\n",
        heading("A page") + "\n:doc:`missing`\n",
        heading("An object") + "\n.. autoclass:: kvell.Nothing\n",
    ],
)
def test_what_leads_nowhere_is_refused(text: str, tmp_path: Path) -> None:
    source = written(tmp_path / "source", index=text)
    assert rendered(source, tmp_path / "out", "dummy") == 1


def test_a_page_without_mistakes_is_taken(tmp_path: Path) -> None:
    source = written(tmp_path / "source", index="# Title\n\n## Place\n\n[there](#place)\n")
    assert rendered(source, tmp_path / "out", "dummy") == 0


@pytest.mark.long
def test_the_whole_reference_has_no_warning(tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    assert rendered(tmp_path / "source", tmp_path / "out", "dummy") == 0


def test_nothing_is_built_while_something_is_not_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "complaints", lambda: ["kvell.x: no docstring"])
    assert build(tmp_path / "reference") == 1
    assert list(tmp_path.iterdir()) == []
    assert "kvell.x: no docstring\n1 things are not described" in capsys.readouterr().err

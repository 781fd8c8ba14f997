"""The page: one document, that needs nothing from elsewhere and may do no more than it needs."""

import base64
import hashlib
import re
import tomllib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from kvell.server.map.page import SCRIPTS, make_page

PAGE = make_page()
STATIC = resources.files("kvell.server.map").joinpath("static")
TEXT = PAGE.html.decode()
POLICY = dict(part.split(" ", 1) for part in PAGE.headers["Content-Security-Policy"].split("; "))


class Document(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"style": [], "script": []}
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag if tag in self.inline else ""

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.inline[self._in].append(data)


@pytest.fixture(scope="module")
def document() -> Document:
    parsed = Document()
    parsed.feed(TEXT)
    return parsed


@pytest.mark.parametrize("kind", ["style", "script"])
def test_the_policy_names_exactly_what_stands_in_the_document(
    document: Document, kind: str
) -> None:
    (content,) = document.inline[kind]
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert POLICY[f"{kind}-src"] == f"'sha256-{digest}'"


def test_the_policy_allows_itself_and_nothing_else() -> None:
    assert POLICY["default-src"] == "'none'"
    assert POLICY["connect-src"] == "'self'"
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert POLICY[name] == "'none'"
    assert "unsafe" not in PAGE.headers["Content-Security-Policy"]
    assert "http" not in PAGE.headers["Content-Security-Policy"]


def test_links_lead_to_this_server_only() -> None:
    """They are relative: a proxy may have the server under a path of its own."""
    script = TEXT[TEXT.index("<script>") :]
    links = re.search(r"const LINKS = \{(.*?)\}", script, re.DOTALL)
    assert links is not None
    assert re.findall(r'"?([\w./]+)"?: "', links[1]) == ["metrics", "docs"]


def test_every_figure_has_its_sentence() -> None:
    script = TEXT[TEXT.index("<script>") :]
    helped = set(re.findall(r"HELP\.(\w+)", script))
    block = re.search(r"const HELP = \{(.*?)\n\};", script, re.DOTALL)
    assert block is not None
    known = set(re.findall(r"^  (\w+):", block[1], re.MULTILINE))
    assert helped <= known and {"borrowed", "lent", "withheld"} <= known


def test_nothing_comes_from_elsewhere(document: Document) -> None:
    assert "http://" not in TEXT and "https://" not in TEXT
    for tag, attributes in document.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:,") == "data:,", tag


def test_there_are_no_inline_handlers_or_styles(document: Document) -> None:
    for tag, attributes in document.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag


def test_places_are_filled() -> None:
    assert "/*STYLE*/" not in TEXT and "/*SCRIPT*/" not in TEXT
    for name in SCRIPTS:
        assert STATIC.joinpath(name).read_text("utf-8") in TEXT


def test_scripts_are_strict_and_make_no_markup_of_what_they_are_told() -> None:
    script = TEXT[TEXT.index("<script>") :]
    assert script.startswith('<script>"use strict";')
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert forbidden not in script
    for storage in ("localStorage", "sessionStorage", "document.cookie", "indexedDB"):
        assert storage not in script, "a key is kept in memory only"


def test_everything_that_can_be_operated_has_a_name(document: Document) -> None:
    labels = {attributes.get("for") for tag, attributes in document.tags if tag == "label"}
    for tag, attributes in document.tags:
        if tag == "input":
            assert attributes["id"] in labels
        if attributes.get("role") == "region":
            assert "aria-label" in attributes or "aria-labelledby" in attributes
    canvases = [attributes for tag, attributes in document.tags if tag == "canvas"]
    assert [canvas["tabindex"] for canvas in canvases] == ["0"]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def schemes() -> list[dict[str, str]]:
    style = STATIC.joinpath("map.css").read_text("utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in (light, dark)]
    assert set(found[0]) == set(found[1])
    return found


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_text_can_be_read_and_used_pages_told_from_empty_ones(scheme: dict[str, str]) -> None:
    for ground in ("page", "card"):
        assert contrast(scheme["ink"], scheme[ground]) >= 7
        assert contrast(scheme["quiet"], scheme[ground]) >= 4.5
        assert contrast(scheme["accent"], scheme[ground]) >= 3
    for number in range(8):
        assert contrast(scheme[f"group-{number}"], scheme["empty"]) >= 3
    assert contrast(scheme["loan"], scheme["empty"]) >= 3


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_a_colour_is_of_one_thing(scheme: dict[str, str]) -> None:
    cells = [name for name in scheme if name.startswith("group-")] + ["loan", "withheld", "empty"]
    assert len({scheme[name] for name in cells}) == len(cells)


def test_the_files_are_part_of_the_package() -> None:
    """The build packs the whole folder src/kvell; nothing in it may be left out."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["wheel"] == {"packages": ["src/kvell"]}
    for name in ("map.html", "map.css", *SCRIPTS):
        assert Path("src/kvell/server/map/static", name).is_file()

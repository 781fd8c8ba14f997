"""Relative links and anchors of documents lead somewhere."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.fences import FENCE, HEADING

ROOT = Path(__file__).parents[2]
PATTERNS = (
    *("*.md", "docs/**/*.md", "src/**/README.md", "bench/**/README.md"),
    *("dashboards/*.md", "scripts/**/README.md"),
)
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)})
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()]*\))?)\)")
CODE = re.compile(r"``.*?``|`[^`\n]*`")


def links_of(text: str) -> list[str]:
    targets = LINK.findall(CODE.sub("", FENCE.sub("", text)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    anchors: set[str] = set()
    counts: Counter[str] = Counter()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w -]", "", words).replace(" ", "-")
        anchors.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return anchors


@cache
def anchors_in(path: Path) -> set[str]:
    return anchors_of(path.read_text())


def broken(page: Path) -> list[str]:
    problems = []
    for target in links_of(page.read_text()):
        name, _, anchor = unquote(target).partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors_in(path)):
            problems.append(target)
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One, two\n## One, two\n[a](#one-two-1) [b](#two) [c](b.md) `[d](e.md)`\n"
        "[web](https://x.example) [f](a.md#one-two)\n```text\n[g](h.md)\n# No heading\n```\n"
    )
    assert broken(page) == ["#two", "b.md"]
    assert anchors_in(page) == {"one-two", "one-two-1"}

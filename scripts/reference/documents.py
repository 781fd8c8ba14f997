"""The repository's documents as pages: copied to where their links to each other still work."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from scripts.reference.rst import contents, heading, page

FOLDERS = ("docs", "bench", "src/kvell", "dashboards", "scripts")
"""All documents in them and below are pages."""
LINK = re.compile(r"\]\(([^)#\s]+)")

GUIDES = (
    *("README", "docs/quickstart", "docs/install", "docs/http", "docs/chat"),
    *("docs/schemas-and-tools", "docs/instances", "docs/cluster", "docs/replay"),
    *("docs/operations", "docs/metrics", "docs/memory-map", "docs/memory-library"),
    "docs/architecture",
)
"""The first guides; other documents in docs/ follow them."""
DEVELOPMENT = (
    "CONTRIBUTING",
    "decisions",
    "rooms",
    "benchmarks",
    "tools",
    "CHANGELOG",
    "docs/README",
)
TITLES = {"README": "What Kvell is", "docs/README": "All documents"}
"""Titles in the list of pages, where the document's own says too little."""
REFERENCE = ("python/index", "commands/index", "http/index", "metrics")
INTRODUCTION = """
The reference is made from the code: from its docstrings, flags, routes and metrics.
"""
GROUPS = {
    "decisions": ("Decisions", "docs/adr/"),
    "rooms": ("Rooms of the code", "src/kvell/"),
    "benchmarks": ("Benchmarks and their results", "bench/"),
    "tools": ("Tools", "scripts/"),
}
"""Pages that list the documents of a folder: title and folder by the page's name."""


def copy_documents(repository: Path, target: Path) -> list[PurePosixPath]:
    """Copy all documents, and what they show or link to, below ``target``; return the documents."""
    documents = set(repository.glob("*.md"))
    for folder in FOLDERS:
        documents.update((repository / folder).rglob("*.md"))
    files = {path for document in documents for path in _linked(document)}
    for path in documents | files:
        copy = target / path.relative_to(repository)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    return sorted(PurePosixPath(path.relative_to(repository)) for path in documents)


def _linked(document: Path) -> Iterator[Path]:
    """The files to which a document links, other documents too."""
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        path = Path(os.path.normpath(document.parent / target))
        if path.is_file():
            yield path


def index_pages(documents: list[PurePosixPath]) -> dict[PurePosixPath, str]:
    """Return the first page, and the pages that list the documents of a folder."""
    names = [str(path.with_suffix("")) for path in documents]
    listed = {
        PurePosixPath(f"{name}.rst"): page(
            heading(title), contents(one for one in names if one.startswith(folder))
        )
        for name, (title, folder) in GROUPS.items()
    }
    first = page(
        heading("Kvell"),
        INTRODUCTION,
        contents(REFERENCE, "Reference"),
        contents(_titled(_guides(names)), "Guides"),
        contents(_titled(DEVELOPMENT), "Development"),
    )
    return {PurePosixPath("index.rst"): first, **listed}


def _guides(names: Sequence[str]) -> list[str]:
    folders = tuple(folder for _, folder in GROUPS.values())
    others = [name for name in names if name not in DEVELOPMENT and not name.startswith(folders)]
    first = [name for name in GUIDES if name in others]
    return [*first, *(name for name in others if name not in first)]


def _titled(names: Iterable[str]) -> list[str]:
    return [f"{TITLES[name]} <{name}>" if name in TITLES else name for name in names]

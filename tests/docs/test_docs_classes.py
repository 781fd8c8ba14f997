"""Classes that documents for users name can be imported as users would."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import kvell
from kvell.cli.main import root
from kvell.equivalents.table import EQUIVALENTS, VALUES
from scripts.house import modules
from scripts.reference.equivalents import PAGE, page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INSIDE = {"architecture.md"}
"""Pages about the source, which name classes that users do not need."""
OTHERS = {"Engine"}
"""Classes of other systems that have the name of one of Kvell's own: SGLang's."""
SPAN = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(r"(?<![\w.])([A-Z][A-Za-z]+)(?=[(.])")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@cache
def classes() -> frozenset[str]:
    return frozenset(one.name for module in modules().values() for one in module.classes())


def imports(page: str) -> list[tuple[str, str]]:
    """(module, name) of what a page's examples import from Kvell."""
    return [
        (node.module, alias.name)
        for block in BLOCK.findall(page)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvell")
        for alias in node.names
    ]


def named(page: str) -> set[str]:
    spans = SPAN.findall(BLOCK.sub("", page))
    return {name for span in spans for name in NAMED.findall(span)} & classes() - OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_is_there(page: Path) -> None:
    for module, name in imports(page.read_text()):
        assert hasattr(import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize(
    "page", [one for one in PAGES if one.name not in INSIDE], ids=lambda page: page.name
)
def test_classes_that_a_page_names_are_imported_there_or_are_kvells(page: Path) -> None:
    text = page.read_text()
    missing = named(text) - {name for _, name in imports(text)} - kvell.MODULES.keys()
    assert missing == set()


def test_all_public_names_are_there_and_no_other() -> None:
    for name in {*kvell.__all__, *kvell.MODULES}:
        assert getattr(kvell, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = kvell.Nothing


def test_names_in_documents_are_seen() -> None:
    page = "Use `LLM.embed` or `SamplingParams(n=2)`, not `Nothing(…)`; `AsyncEngine` is named."
    assert named(page) == {"LLM", "SamplingParams"}
    block = "```python\nfrom kvell import LLM\n```"
    assert imports(block) == [("kvell", "LLM")]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page()


def test_no_entry_hides_a_flag_of_kvell() -> None:
    flags = {name for option in root.commands["serve"].params for name in option.opts}
    hidden = [name for entry in EQUIVALENTS for name in entry.names if name in flags]
    assert hidden == []
    assert VALUES.keys() <= flags

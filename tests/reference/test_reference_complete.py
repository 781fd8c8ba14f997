"""Everything public is in the reference, and is described there."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import click
import pytest

import kvell
from kvell import errors, memory
from kvell.cli.main import root
from kvell.server.metrics.front_metrics import HISTOGRAMS, ServerMetrics
from scripts.reference.build import generated_pages
from scripts.reference.command_pages import commands, place_of
from scripts.reference.complaints import complaints
from scripts.reference.documents import copy_documents, index_pages
from scripts.reference.http.pages import openapi_document

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted((REPOSITORY / "src" / "kvell").rglob("*.py"))


@cache
def pages() -> dict[str, str]:
    return {str(path): text for path, text in generated_pages().items()}


def described(folder: str) -> set[str]:
    text = "\n".join(text for path, text in pages().items() if path.startswith(folder))
    automatic = re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE)
    others = re.findall(r"^\.\. py:\w+:: (\S+)\n   :module: (\S+)", text, re.MULTILINE)
    return {*automatic, *(f"{module}.{name}" for name, module in others)}


def test_nothing_public_lacks_a_description() -> None:
    assert complaints() == []


@pytest.mark.parametrize("name", [name for name in kvell.__all__ if name != "__version__"])
def test_what_kvell_exports_is_described(name: str) -> None:
    own = getattr(kvell, name).__name__  # vLLM's names of a class are described as Kvell's own
    assert f"kvell.{own}" in described("python/")
    assert f"kvell.{own}" in pages()["python/index.rst"]


def test_what_the_memory_core_exports_is_described() -> None:
    assert {f"kvell.memory.{name}" for name in memory.__all__} <= described("python/memory")


def test_all_errors_are_described() -> None:
    own = {f"kvell.errors.{name}" for name, one in vars(errors).items() if isinstance(one, type)}
    assert len(own) >= 4
    assert own <= described("python/errors")


def visible(group: click.Group) -> Iterator[click.Command]:
    return (one for one in group.commands.values() if not one.hidden)


def test_every_command_has_a_page_and_the_index_names_it() -> None:
    names = {one.name for one in visible(root)}
    assert {"serve", "generate", "bench", "cluster"} <= names
    for name in names:
        assert f":prog: kvell {name}\n" in pages()[f"commands/{name}.rst"]
        assert f"kvell {name} <{name}>" in pages()["commands/index.rst"]
    assert "instance" not in commands()


def test_pages_of_groups_show_the_commands_below_them() -> None:
    assert any(isinstance(one, click.Group) for one in visible(root))
    for one in visible(root):
        assert ":nested: full" in pages()[f"commands/{one.name}.rst"]


def test_a_command_that_cannot_be_found_again_is_told() -> None:
    @click.command()
    def lost() -> None:
        """Somewhere inside a function."""

    with pytest.raises(LookupError, match="command lost"):
        place_of(lost)


def test_every_route_has_a_page_with_its_fields_bounds_and_defaults() -> None:
    document = openapi_document()
    titles = {text.partition("\n")[0] for path, text in pages().items() if path.startswith("http/")}
    for path, methods in document["paths"].items():
        assert {f"{method.upper()} {path}" for method in methods} <= titles
    chat = pages()["http/post-v1-chat-completions.rst"]
    for field in document["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"``{field}``" in chat
    assert "number, more than 0, at most 86,400" in chat
    assert "list of at least 1, at most 4,096: :ref:`ChatMessage" in chat


def test_the_document_lies_beside_the_pages() -> None:
    assert json.loads(pages()["http/openapi.json"]) == openapi_document()
    assert "<openapi.json>" in pages()["http/index.rst"]


def test_every_metric_of_a_server_is_named_with_its_labels() -> None:
    page = pages()["metrics.rst"]
    families = list(ServerMetrics("m").registry.collect())
    assert len(families) > 10
    for one in families:
        name = f"{one.name}_total" if one.type == "counter" else one.name
        assert f"``{name}``" in page
    for name in HISTOGRAMS:
        assert page.count(f"``kvell:{name}``") == 2  # once with its bounds
    answers = page.partition("``kvell:request_success_total``")[2].partition("   * -")[0]
    assert "``model_name``, ``finished_reason``" in answers


def test_every_document_is_a_page_once(tmp_path: Path) -> None:
    documents = copy_documents(REPOSITORY, tmp_path)
    listed = [
        re.sub(r".*<(.*)>", r"\1", line.strip())
        for text in index_pages(documents).values()
        for line in text.splitlines()
        if line.startswith("   ") and not line.strip().startswith(":")
    ]
    names = [str(path.with_suffix("")) for path in documents]
    assert len(names) > 40
    assert {"README", "docs/http", "docs/adr/README", "src/kvell/pages/README"} <= set(names)
    assert sorted(one for one in listed if one in names) == sorted(names)


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the package, and every text below an assignment."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str):
                    yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", text


ASKS = re.compile(r"(?:\A|\n\s*\n|:(?:param|ivar) \w+:)[^\n?]*\?\s*(?:\n\s*\n|\n\s*:|\Z)")
DRAWING = re.compile(r"::\n\n.*", re.DOTALL)


def asks(text: str) -> bool:
    return ASKS.search(DRAWING.sub("", text.strip())) is not None


def test_no_docstring_is_a_question() -> None:
    found = list(docstrings())
    assert len(found) > 3000
    assert [place for place, text in found if asks(text)] == []


@pytest.mark.parametrize(
    ("text", "is_question"),
    [
        ("Are so many pages there now?", True),
        ("A step is over: was it late?", True),
        ("Whether it pays.\n\n    Does it?\n    ", True),
        ("Points.\n\n    :param fits: does the pool hold them?\n    :param n: how many.\n", True),
        ("Are they there?\n\nSometimes.", True),
        ("Whether they are there.", False),
        ("Reads ``a?b`` and nothing else.", False),
        ("States::\n\n    send ─► lost?\n", False),
    ],
)
def test_questions_are_recognised(text: str, is_question: bool) -> None:
    assert asks(text) is is_question


def test_pages_are_named_as_their_address_will_be() -> None:
    for path in map(PurePosixPath, pages()):
        assert re.fullmatch(r"[a-z0-9_./-]+", str(path), re.IGNORECASE), path

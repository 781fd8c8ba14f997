"""Pieces of pages: titles, tables, lists; documents, metrics, options."""

from pathlib import Path, PurePosixPath
from typing import Any

import click
import pytest

from scripts.reference.command_pages import command_pages
from scripts.reference.documents import copy_documents, index_pages
from scripts.reference.hooks import complete_options
from scripts.reference.metric_pages import SECTIONS, known_metrics
from scripts.reference.rst import code, contents, heading, page, table


def test_a_title_is_underlined_by_its_level() -> None:
    assert heading("Title") == "Title\n=====\n"
    assert heading("To", 1) == "To\n---\n"  # three at least
    assert heading("Part", 2, "place") == ".. _place:\n\nPart\n~~~~\n"


def test_cells_may_have_several_paragraphs() -> None:
    text = table(("A", "B"), (1, 3), [("one", "two\n\nthree")])
    assert text.splitlines() == [
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: 1 3",
        "",
        "   * - A",
        "     - B",
        "   * - one",
        "     - two",
        "",
        "       three",
    ]


def test_a_list_of_pages_has_a_caption_or_is_hidden() -> None:
    expected = ".. toctree::\n   :maxdepth: 1\n   :caption: More\n   :hidden:\n\n   a\n   b/c\n"
    assert contents(["a", "b/c"], "More", hidden=True) == expected
    assert ":hidden:" not in contents(["a"])


def test_parts_of_a_page_stand_apart_and_empty_ones_are_left_out() -> None:
    assert page("a\n", "", "\nb") == "a\n\nb\n"
    assert (code("x"), code("")) == ("``x``", "")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A few documents that link to each other, and to files."""
    files = {
        "README.md": "# R\n[using](docs/http.md#place) ![picture](docs/images/a.png)\n",
        "docs/http.md": "# U\n[figures](../bench/results/one.json) [web](https://x.example/a)\n",
        "docs/another.md": "# A\n",
        "docs/adr/0001-why.md": "# Why\n",
        "docs/images/a.png": "picture",
        "bench/results/one.json": "{}",
        "bench/results/two.json": "{}",
        "src/kvell/pages/README.md": "# Pages\n",
        "src/kvell/pages/pool.py": "",
        "notes.txt": "",
    }
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "repository"


def test_documents_are_copied_with_what_they_link_to(repository: Path, tmp_path: Path) -> None:
    documents = copy_documents(repository, tmp_path / "copy")
    assert documents == [
        PurePosixPath(name)
        for name in (
            *("README.md", "docs/adr/0001-why.md", "docs/another.md", "docs/http.md"),
            "src/kvell/pages/README.md",
        )
    ]
    copied = {
        str(path.relative_to(tmp_path / "copy"))
        for path in (tmp_path / "copy").rglob("*")
        if path.is_file()
    }
    files = {"docs/images/a.png", "bench/results/one.json"}
    assert copied == {*map(str, documents), *files}


def test_guides_come_in_order_and_others_behind_them(repository: Path, tmp_path: Path) -> None:
    pages = index_pages(copy_documents(repository, tmp_path / "copy"))
    first = pages[PurePosixPath("index.rst")]
    guides = first.partition(":caption: Guides\n\n")[2].partition("\n\n")[0]
    listed = ["What Kvell is <README>", "docs/http", "docs/another"]
    assert [line.strip() for line in guides.splitlines()] == listed
    assert "docs/adr/0001-why" in pages[PurePosixPath("decisions.rst")]
    assert "src/kvell/pages/README" in pages[PurePosixPath("rooms.rst")]


def test_metrics_stand_in_their_sections() -> None:
    metrics = {one.name: one for one in known_metrics()}
    assert metrics["kvell:request_success_total"].section == SECTIONS[0]
    assert metrics["kvell:num_requests_running"].section == SECTIONS[1]
    assert metrics["kvell:num_requests_running"].labels == ("model_name", "instance")
    assert metrics["process_open_fds"].section == SECTIONS[2]
    assert metrics["kvell:inter_token_latency_seconds"].kind == "histogram"
    assert metrics["kvell:inter_token_latency_seconds"].labels == ("model_name",)
    sections = [one.section for one in metrics.values()]
    assert sections == sorted(sections, key=SECTIONS.index)


def test_metrics_that_an_instance_may_lack_are_there() -> None:
    names = {one.name for one in known_metrics()}
    for name in (
        "cpu_buffer_large_pages",
        "cpu_buffer_parked",
        "memory_chunks",
        "group_used_pages",
    ):
        assert f"kvell:{name}" in names


@click.command()
@click.option("--count", type=click.IntRange(1, 9), default=2, show_default=True, help="How many.")
@click.option("--limit", type=click.FloatRange(min=0), metavar="SECONDS", help="How long.")
@click.option("--model", metavar="[NAME=]MODEL", help="Which.")
@click.option("--secret", hidden=True)
@click.option("--fast/--slow", help="How.")
def command(**_given: Any) -> None:
    """Do it."""


def test_options_get_their_range_and_the_name_of_their_value() -> None:
    lines = [
        *(".. option:: --count <count>", "", "    How many.", "", "    :default: ``2``", ""),
        *(".. option:: --limit <SECONDS>", "", "    How long.", ""),
        *(".. option:: --model <NAME=]MODEL>", "", "    Which.", ""),
        *(".. option:: --fast, --slow", "", "    How.", ""),
    ]
    complete_options(None, click.Context(command), lines)  # type: ignore[arg-type]
    assert lines == [
        *(".. option:: --count <count>", "", "    How many.", ""),
        *("    :default: ``2``", "    :range: ``1<=x<=9``", ""),
        *(".. option:: --limit <SECONDS>", "", "    How long.", "", "    :range: ``x>=0``", ""),
        *(".. option:: --model <[NAME=]MODEL>", "", "    Which.", ""),
        *(".. option:: --fast, --slow", "", "    How.", ""),
    ]


def test_the_index_of_commands_has_the_options_before_them() -> None:
    index = command_pages()[PurePosixPath("commands/index.rst")]
    assert ".. click:: kvell.cli.main:root\n   :prog: kvell\n   :nested: none" in index

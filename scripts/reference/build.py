"""Puts the pages together and lets Sphinx render them; every warning is an error."""

import shutil
from pathlib import Path, PurePosixPath

import click
from sphinx.cmd.build import build_main

from scripts.reference.command_pages import command_pages
from scripts.reference.complaints import complaints
from scripts.reference.documents import copy_documents, index_pages
from scripts.reference.http.pages import http_pages
from scripts.reference.metric_pages import metric_pages
from scripts.reference.python.pages import python_pages

REPOSITORY = Path(__file__).parents[2]


def generated_pages() -> dict[PurePosixPath, str]:
    """Return every page that is made from the code, by its path."""
    return {**python_pages(), **command_pages(), **http_pages(), **metric_pages()}


def write_source(target: Path) -> None:
    """Write everything that Sphinx reads into an empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    documents = copy_documents(REPOSITORY, target)
    for path, text in {**generated_pages(), **index_pages(documents)}.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def build(output: Path) -> int:
    """Build the reference; return 0, or 1 if anything is missing or wrong.

    :param output: is replaced; what Sphinx reads stays beside it, for who looks for a mistake.
    """
    found = complaints()
    if found:
        click.echo("\n".join([*found, f"{len(found)} things are not described"]), err=True)
        return 1
    source = output.with_name(f"{output.name}-source")
    write_source(source)
    shutil.rmtree(output, ignore_errors=True)
    arguments = ["--quiet", "--fail-on-warning", "--fresh-env", "--builder", "html"]
    places = ["--conf-dir", str(Path(__file__).parent), "--doctree-dir", f"{source}/.doctrees"]
    return build_main([*arguments, *places, str(source), str(output)])

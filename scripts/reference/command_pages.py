"""Pages of the command line, a page for each command, made by sphinx-click from click's objects."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from pkgutil import resolve_name

import click

from kvell.cli.main import root
from scripts.reference.rst import contents, heading, page, table

FOLDER = PurePosixPath("commands")
TEXT = """
Sizes read ``512MiB`` or ``24GB``.  A command ends with 0 when it is done, with 2 when you must
change something (one line says what), and with 1 when Kvell has a bug.
The :doc:`documents by task </docs/README>` have examples.
"""


def commands() -> dict[str, click.Command]:
    """Return the commands below ``kvell`` that ``--help`` lists, by name."""
    return {name: one for name, one in root.commands.items() if not one.hidden}


def command_pages() -> dict[PurePosixPath, str]:
    """Return the text of every page by its path."""
    pages = {FOLDER / f"{name}.rst": _page(name, one) for name, one in commands().items()}
    return {FOLDER / "index.rst": _index(), **pages}


def _index() -> str:
    rows = (
        (f":doc:`kvell {name} <{name}>`", one.get_short_help_str(200))
        for name, one in commands().items()
    )
    return page(
        heading("Command line"),
        TEXT,
        table(("Command", "What it does"), (30, 70), rows),
        heading("Options before the command", 1),
        _directive(root, "kvell", "none"),
        contents(commands(), hidden=True),
    )


def _page(name: str, command: click.Command) -> str:
    return page(_directive(command, f"kvell {name}", "full"))


def _directive(command: click.Command, program: str, nested: str) -> str:
    return f".. click:: {place_of(command)}\n   :prog: {program}\n   :nested: {nested}\n"


def place_of(command: click.Command) -> str:
    """Return where a command can be imported from, as ``module:name``.

    :raises LookupError: if the function that it calls does not tell.
    """
    for place in _places(command):
        try:
            if resolve_name(place) is command:
                return place
        except AttributeError:
            continue
    raise LookupError(f"command {command.name}: its module has no variable of its function's name")


def _places(command: click.Command) -> Iterator[str]:
    if command.callback is not None:
        yield f"{command.callback.__module__}:{command.callback.__name__}"

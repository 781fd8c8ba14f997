"""Pages of the Python reference: directives that let Sphinx read the docstrings."""

import inspect
from collections.abc import Iterator
from pathlib import PurePosixPath
from textwrap import indent

import kvell
from scripts.reference.python.aliases import is_alias
from scripts.reference.python.annotations import assigned_type
from scripts.reference.python.docstrings import docstring, found
from scripts.reference.python.public import PAGES, PythonPage
from scripts.reference.rst import contents, heading, page

FOLDER = PurePosixPath("python")
LONGEST_VALUE = 120


def python_pages() -> dict[PurePosixPath, str]:
    """Return the text of every page by its path."""
    pages = {FOLDER / f"{one.name}.rst": _page(one) for one in PAGES}
    return {FOLDER / "index.rst": _index(), **pages}


def _index() -> str:
    exported = "\n".join(map(_entry, (name for name in kvell.__all__ if name[0] != "_")))
    return page(
        heading("Python"),
        "``import kvell`` is cheap.  It loads torch and transformers when one of these is used:",
        exported,
        f"``kvell.__version__`` is the version as text, here ``{kvell.__version__}``.",
        contents(one.name for one in PAGES),
    )


def _entry(name: str) -> str:
    if name in kvell.SAME:
        return f"* ``kvell.{name}``, a second name of :obj:`kvell.{kvell.SAME[name]}`"
    return f"* :obj:`kvell.{name}`"


def _page(one: PythonPage) -> str:
    return page(heading(one.title), one.text, *_sections(one))


def _sections(one: PythonPage) -> Iterator[str]:
    for section in one.sections:
        yield heading(section.title, 1)
        yield section.text
        yield from map(directive, section.names)


def directive(name: str) -> str:
    """Return the directive that describes a public object."""
    value = found(name)
    if isinstance(value, type) and issubclass(value, BaseException):
        return f".. autoexception:: {name}"
    if inspect.isclass(value):
        bases = [one for one in value.__bases__ if one.__module__.startswith("kvell.")]
        return f".. autoclass:: {name}" + ("\n   :show-inheritance:" if bases else "")
    if inspect.isfunction(value):
        return f".. autofunction:: {name}"
    module, _, short = name.rpartition(".")
    kind, option = ("type", "canonical") if is_alias(value) else ("data", "value")
    shown = _type_text(name) if is_alias(value) else _shown(value)
    options = f"   :module: {module}\n   :{option}: {shown}"
    return f".. py:{kind}:: {short}\n{options}\n\n{indent(docstring(name), '   ')}\n"


def _type_text(name: str) -> str:
    supertype = getattr(found(name), "__supertype__", None)
    return supertype.__name__ if supertype else assigned_type(name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"

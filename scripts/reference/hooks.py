"""What Sphinx is told beyond its configuration while it reads the pages."""

import re
from typing import Any

import click
from sphinx.application import Sphinx

from scripts.reference.python.annotations import written_annotations
from scripts.reference.python.docstrings import field_texts, parameter_texts, parameters

OPTION = ".. option::"
MARKUP = re.compile(r"[*|]")
"""Characters of plain help texts that reStructuredText would read as markup."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions below; Sphinx calls it."""
    app.connect("autodoc-process-signature", write_annotations)
    app.connect("autodoc-process-docstring", add_field_texts)
    app.connect("sphinx-click-process-options", complete_options)
    return {"parallel_read_safe": True}


def write_annotations(
    app: Sphinx, what: str, name: str, value: Any, _options: Any, arguments: str | None, _type: Any
) -> tuple[str, str] | None:
    """Show the types that the source names, not what they stand for.

    Those of parameters stand beside what the docstring says of them; what is returned stands in
    the signature.
    """
    known = app.env.current_document.autodoc_annotations.get(name)
    if not known:
        return None
    written = written_annotations(value)
    known.update({name: text for name, text in written.items() if name in known})
    if what not in ("function", "method") or arguments is None or "return" not in known:
        return None
    return arguments, known.pop("return")


def complete_options(_app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Show options as ``--help`` does: the value's name as it is, and its range."""
    options = [
        one for one in context.command.params if isinstance(one, click.Option) and not one.hidden
    ]
    lines[:] = [one if one.startswith(OPTION) else MARKUP.sub(r"\\\g<0>", one) for one in lines]
    starts = [place for place, line in enumerate(lines) if line.startswith(OPTION)]
    for option, start in reversed(list(zip(options, starts, strict=True))):
        if option.metavar:
            lines[start] = f"{OPTION} {', '.join(option.opts)} <{option.metavar.strip('<>')}>"
        extra = option.get_help_extra(context)
        if "range" in extra:
            _add_field(lines, start, f"    :range: ``{extra['range']}``")


def _add_field(lines: list[str], start: int, field: str) -> None:
    """Put a field at the end of the option that begins at a line."""
    following = (i for i in range(start + 1, len(lines)) if lines[i].startswith(OPTION))
    end = next(following, len(lines))
    while not lines[end - 1].strip():
        end -= 1
    fields = lines[end - 1].lstrip().startswith(":")
    lines[end:end] = [field] if fields else ["", field]


def add_field_texts(
    _app: Sphinx, _what: str, _name: str, value: Any, _options: Any, lines: list[str]
) -> None:
    """Describe the fields of a class that have texts below them."""
    own = parameter_texts("\n".join(lines))
    texts = {name: text for name, text in field_texts(value).items() if name not in own}
    given = parameters(value) if texts else ()
    lines.extend(f":param {name}: {text}" for name, text in texts.items() if name in given)

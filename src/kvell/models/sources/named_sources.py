"""Parser of ``--model``, given once or several times: names of models and their sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvell.errors import ChangeSomething


@dataclass(frozen=True)
class NamedSource:
    """A model's name in requests, and its source (``sources.source.resolve_model``)."""

    name: str
    source: str


def named_source(text: str) -> NamedSource:
    """Parse ``NAME=SOURCE``, or a source that is its own name.

    Text that is an existing path is never split, even at a ``=``.
    """
    name, mark, source = text.partition("=")
    if mark and "/" not in name and not Path(text).expanduser().exists():
        return NamedSource(name, source)
    return NamedSource(text, text)


def named_sources(first: str, beside: Sequence[str]) -> list[NamedSource]:
    """Parse all models to be served.

    :raises ChangeSomething: if two have the same name.
    """
    sources = [named_source(text) for text in (first, *beside)]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            remedy = "give each a name: --model NAME=PATH"
            raise ChangeSomething("model", name, "is the name of two models", remedy)
    return sources

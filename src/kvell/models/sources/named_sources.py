"""What ``--model`` says, once or several times: what requests call a model, and where it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvell.errors import ChangeSomething


@dataclass(frozen=True)
class NamedSource:
    """A model's name, and where it is to be had (:func:`source.resolve_model`)."""

    name: str
    source: str


def named_source(text: str) -> NamedSource:
    """``NAME=SOURCE``, or a source that is its own name.

    A source that exists is never cut, whatever it holds.
    """
    name, mark, source = text.partition("=")
    if mark and "/" not in name and not Path(text).expanduser().exists():
        return NamedSource(name, source)
    return NamedSource(text, text)


def named_sources(first: str, beside: Sequence[str]) -> list[NamedSource]:
    """All that is to be served; every name once.

    :raises ChangeSomething: if two have one name.
    """
    found = [named_source(text) for text in (first, *beside)]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            remedy = "give each a name: --model NAME=PATH"
            raise ChangeSomething("model", name, "is the name of two models", remedy)
    return found

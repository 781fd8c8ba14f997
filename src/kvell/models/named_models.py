"""Models by the names that requests call them: what ``--model`` says, once or several times."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.models.loading import check_model
from kvell.models.progress import Progress
from kvell.models.source import resolve_model
from kvell.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class NamedSource:
    """A model's name, and where it is to be had (:func:`source.resolve_model`)."""

    name: str
    source: str


@dataclass(frozen=True)
class NamedModel:
    """A model that was found and may be served; its weights are not read yet."""

    name: str
    path: Path
    tokenizer: Tokenizer


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


def open_named(
    first: str, beside: Sequence[str], cache_dir: Path, progress: Progress
) -> list[NamedModel]:
    """Find all models and make sure, from their configs, that they can be served.

    :raises ChangeSomething: naming whatever is wrong.
    """
    opened = []
    for one in named_sources(first, beside):
        path = resolve_model(one.source, cache_dir, progress)
        check_model(path)
        opened.append(NamedModel(one.name, path, Tokenizer.load(path)))
    return opened

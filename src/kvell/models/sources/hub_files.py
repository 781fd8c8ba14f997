"""Names of GGUF files on the hub, in the way of Ollama and llama.cpp: ``owner/name:Q4_K_M``."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvell.errors import ChangeSomething

_NAME = re.compile(
    r"(?P<host>(https?://)?(hf\.co|huggingface\.co)/)?(?P<repository>[\w.-]+/[\w.-]+)(:(?P<kind>[\w-]+))?"
)
_KIND = re.compile(r"(UD-)?(I?Q\d\w*|B?F16|F32)", re.IGNORECASE)
DEFAULT_KIND = "Q4_K_M"
BESIDE = "mmproj"
"""Beginning of the names of files that have a model's encoder of images."""


@dataclass(frozen=True)
class HubFile:
    """A GGUF file on the hub.

    :param kind: the type of most of its matrices, as its name has it.
    """

    repository: str
    kind: str

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of its name and of the names of its parts, in either case."""
        kinds = (self.kind, self.kind.lower(), self.kind.upper())
        ends = (".gguf", "-?????-of-?????.gguf")
        return tuple(f"*[-._]{kind}{end}" for kind in dict.fromkeys(kinds) for end in ends)


def hub_file(model: str) -> HubFile | None:
    """Return the GGUF file that a name means; None for another name.

    A name without a host has a type; one with a host has one or ends in GGUF.
    """
    match = _NAME.fullmatch(model)
    if match is None:
        return None
    kind = match["kind"] or ""
    if _KIND.fullmatch(kind):
        return HubFile(match["repository"], kind)
    is_gguf = match["host"] and match["repository"].lower().endswith("gguf") and not kind
    return HubFile(match["repository"], DEFAULT_KIND) if is_gguf else None


def fetched_file(wanted: HubFile, fetch: Callable[[str, Sequence[str]], Path]) -> Path:
    """Return a GGUF file from the hub, or the first part of it.

    :param fetch: fetches the files of a repository that match patterns.
    :raises ChangeSomething: if the repository has none, or cannot be fetched.
    """
    directory = fetch(wanted.repository, wanted.patterns)
    name = re.compile(
        rf".+[-._]{re.escape(wanted.kind)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE
    )
    files = (file for file in directory.rglob("*.gguf") if name.fullmatch(file.name))
    models = sorted(file for file in files if not file.name.startswith(BESIDE))
    if models:
        return models[0]
    problem = f"has no GGUF file of the type {wanted.kind}"
    remedy = f"name a type that it has, as in {wanted.repository}:Q8_0"
    raise ChangeSomething("model", wanted.repository, problem, remedy)

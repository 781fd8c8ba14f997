"""Models by their names in requests, resolved and checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvell.models.config.embeddings import EmbeddingFacts, embedding_facts
from kvell.models.families.plain_config import known_config
from kvell.models.loading.loading import check_model
from kvell.models.sources.named_sources import named_sources
from kvell.models.sources.progress import Progress
from kvell.models.sources.source import resolve_as, resolve_model
from kvell.models.text.early_tokenizer import load_early
from kvell.models.text.end_tokens import eos_token_ids, tokenizer_end_ids
from kvell.models.text.tokenizer import Tokenizer, tokenizer_or_none

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclass(frozen=True)
class NamedModel:
    """A resolved model that may be served; its weights are not read yet.

    :param tokenizer_path: directory of its tokenizer; None for ``path``.
    """

    name: str
    path: Path
    overrides: str | None = None
    tokenizer_path: Path | None = None
    early_tokenizer: "Future[Tokenizer] | None" = None
    """Its tokenizer, which a thread loads; None if its first use loads it."""

    @property
    def text_path(self) -> Path:
        return self.tokenizer_path or self.path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use; an instance that serves a front never uses it."""
        if self.early_tokenizer is not None:
            return self.early_tokenizer.result()
        return tokenizer_or_none(self.text_path, self.overrides)

    def with_early_tokenizer(self) -> "NamedModel":
        """Return the model with a thread that loads its tokenizer, whose errors its use raises."""
        return replace(self, early_tokenizer=load_early(self.text_path, self.overrides))

    def tokenizer_json(self) -> str:
        """Return the tokenizer in the form of the tokenizers library.

        :raises ChangeSomething: if it has no such form.
        """
        file = self.text_path / "tokenizer.json"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        return self.tokenizer.as_json()

    @cached_property
    def embeddings(self) -> EmbeddingFacts:
        return embedding_facts(self.path, known_config(self.path, self.overrides))

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        own = tokenizer_end_ids(self.text_path)
        if own is None:
            return self.tokenizer.eos_token_ids
        return eos_token_ids(self.path, self.overrides) | own


def open_named(
    first: str,
    beside: Sequence[str],
    cache_dir: Path,
    progress: Progress,
    overrides: str | None = None,
    tokenizer: str | None = None,
) -> list[NamedModel]:
    """Find all models and check from their configs that they can be served.

    :param tokenizer: directory or hub id of the first model's tokenizer; None for its own.
    :raises ChangeSomething: if one is not found, cannot be served, or shares its name.
    """
    opened: list[NamedModel] = []
    texts = None if tokenizer is None else resolve_as("tokenizer", tokenizer, cache_dir, progress)
    for model in named_sources(first, beside):
        path = resolve_model(model.source, cache_dir, progress)
        own = None if opened else overrides
        check_model(path, own)
        opened.append(NamedModel(model.name, path, own, None if opened else texts))
    return opened

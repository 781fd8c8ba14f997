"""The text side of a model for the HTTP front, which holds no weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvell.models.config.description import text_config
from kvell.models.families.plain_config import known_config
from kvell.models.text.detokenizer import IncrementalDetokenizer
from kvell.models.text.stop_strings import StopStrings
from kvell.models.text.tokenizer import Tokenizer


class ServedText:
    """A tokenizer, extended to a :class:`kvell.server.text.text_model.TextModel`."""

    def __init__(self, name: str, vocab_size: int, tokenizer: Tokenizer) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.eos_token_ids = tokenizer.eos_token_ids
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, name: str, path: Path) -> "ServedText":
        """Read the config and the tokenizer in a model's directory.

        :raises ChangeSomething: if its files are damaged.
        """
        vocab_size = int(text_config(known_config(path)).vocab_size)
        return cls(name, vocab_size, Tokenizer.load(path))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of a text, int32 [tokens]."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """Token ids of a conversation up to the start of the answer, int32 [tokens]."""
        return self._tokenizer.encode_chat(messages)

    def detokenizer(self) -> IncrementalDetokenizer:
        """Return a new detokenizer for one request."""
        return IncrementalDetokenizer(self._tokenizer)

    def stop_matcher(self, stop: Sequence[str]) -> StopStrings:
        """Return a new matcher for one request."""
        return StopStrings(tuple(stop))

"""The tokens with which a model fills a gap between two texts (Bavarian et al., 2022)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
_BEFORE, _AFTER = "before", "after"
_FORMS: tuple[tuple[str, ...], ...] = (
    *(
        (begin, _BEFORE, gap, _AFTER, end)
        for begin, gap, end in (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        )
    ),
    ("[SUFFIX]", _AFTER, "[PREFIX]", _BEFORE),
)
"""The order of marks and texts: Qwen and CodeGemma, StarCoder and Granite, SantaCoder, DeepSeek;
Codestral."""
_ENDS = tuple(
    (
        "<|endoftext|> <|fim_pad|> <|file_sep|> <|file_separator|> <|repo_name|> <fim_pad> "
        "<fim-pad> <file_sep> <filename> <|cursor|>"
    ).split()
)
"""Tokens after which a text in a gap is complete, besides the marks themselves."""


@dataclass(frozen=True)
class GapTokens:
    """The form of a prompt whose answer fills a gap.

    :param order: marks by their ids, and the places of the texts before and after the gap.
    :param end_token_ids: tokens that end the answer.
    """

    order: tuple[int | str, ...]
    end_token_ids: tuple[int, ...]

    def prompt(self, before: TokenIds, after: TokenIds) -> TokenIds:
        """Return the token ids of a prompt, int32 ``[tokens]``."""
        texts = {_BEFORE: before, _AFTER: after}
        parts = [
            texts[part] if isinstance(part, str) else np.array([part], np.int32)
            for part in self.order
        ]
        return np.concatenate(parts)


def gap_tokens(token_id: Callable[[str], int | None]) -> GapTokens | None:
    """Return the form of a tokenizer that has all marks of one; None if it has none.

    :param token_id: returns the id of a token by its name; None if there is no such token.
    """
    for form in _FORMS:
        order = [part if part in (_BEFORE, _AFTER) else token_id(part) for part in form]
        places = tuple(part for part in order if part is not None)
        if len(places) == len(form):
            marks = [part for part in places if isinstance(part, int)]
            ends = [end for name in _ENDS if (end := token_id(name)) is not None]
            return GapTokens(places, tuple(dict.fromkeys((*marks, *ends))))
    return None

"""Marks in control tokens that the texts of clients name, so that they stay text.

A chat template writes control tokens such as ``<|im_end|>`` around messages, and the tokenizer
reads the rendered text as a whole.  Without a mark it cannot know who wrote a token.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

SpecialTokensInText = Literal["allow", "escape"]
"""Whether special tokens named in messages are such tokens, as in vLLM, or stay text."""
MARK = "\u2060\u2063\u2060"
"""Invisible characters inside a control token's text; no token is found across them.

They are removed before a text is encoded.  A model's processor for images keeps them.
"""


USUAL_NAMES = ("role", "content")
"""The fields of nearly all messages."""


class AddedToken(Protocol):
    """A token of transformers that a tokenizer finds in a text before all others."""

    content: str
    special: bool


NO_ADDED_TOKENS: Mapping[int, AddedToken] = MappingProxyType({})


class TokenFinder:
    """A search for the texts of tokens, in one pass over a text of any kind.

    :param tokens: texts of tokens; those of one character cannot be marked inside and are ignored.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = {token for token in tokens if len(token) > 1}
        self._pattern = re.compile(_any_of(texts)) if texts else None
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._unmarked = frozenset(name for name in USUAL_NAMES if self.mark(name) == name)

    def mark(self, text: str) -> str:
        """Return a text with a mark inside each token.

        A token's beginning at the end of the text is marked too: a template may join texts.
        """
        pieces = list[str]()
        at = 0
        while self._pattern and (match := self._pattern.search(text, at)):
            pieces.append(text[at : match.start() + 1])  # tokens may overlap
            at = match.start() + 1
        last = text[at:]
        ends = range(min(len(last), self._longest - 1), 0, -1)
        if any(last[-length:] in self._beginnings for length in ends):
            last += MARK
        return MARK.join([*pieces, last])

    def mark_mapping(self, values: Mapping[str, object]) -> dict[str, object]:
        marked: dict[str, object] = {}
        for name, value in values.items():
            own = name if name in self._unmarked else self.mark(name)
            marked[own] = self.mark(value) if isinstance(value, str) else self._mark_value(value)
        return marked

    def _mark_value(self, value: object) -> object:
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return self.mark_mapping(value)
        if isinstance(value, list | tuple):
            return [self._mark_value(item) for item in value]
        return value


class ControlTokens:
    """The control tokens of a chat template.

    :param special: texts of the tokenizer's special tokens.
    :param others: texts of its other added tokens that the template writes, such as
        ``<tool_response>``.  The assistant's own messages may have them.
    :ivar finder: the search for all of them, for functions and variables of the template.
    """

    def __init__(self, special: Iterable[str], others: Iterable[str]) -> None:
        special = frozenset(special)
        self._special = TokenFinder(special)
        self.finder = TokenFinder(special.union(others))

    def mark_messages(self, messages: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
        return [
            (self._special if message.get("role") == "assistant" else self.finder).mark_mapping(
                message
            )
            for message in messages
        ]


def control_tokens(added_tokens: Iterable[AddedToken], template: str) -> ControlTokens:
    """Return the control tokens of a chat template.

    :param template: the template's text.
    """
    added_tokens = list(added_tokens)
    special = [token.content for token in added_tokens if token.special]
    others = [token.content for token in added_tokens if token.content in template]
    return ControlTokens(special, others)


def _any_of(tokens: Iterable[str]) -> str:
    """Return a pattern of any of the tokens, which reads each character of a text once a place."""
    following: dict[str, list[str]] = {}
    for token in tokens:
        following.setdefault(token[:1], []).append(token[1:])
    if "" in following:  # the shortest token is enough to find a place
        return ""
    branches = (re.escape(first) + _any_of(rest) for first, rest in sorted(following.items()))
    return f"(?:{'|'.join(branches)})"

"""The end of an answer's reasoning, after which its grammar begins.

::

    undecided ──its start──────────► inside ──the last of its ends──► over
        └──────any other token────────────────────────────────────────►

Ends are searched in the bytes of the output, as the front does in its text: a tag may be several
tokens, and a token may hold the end of a tag and more.  llguidance could read all of it as one
grammar, but then each token of the reasoning would need a mask, and none could end an answer.
"""

from collections.abc import Sequence
from typing import Any

from kvell.engine.protocol.structured_outputs import Reasoning


class ReasoningReader:
    """A reader of one answer up to the end of its reasoning.

    Its results depend on the output alone, not on the calls that pass it.

    :param tokenizer: llguidance's tokenizer.
    :ivar start: the token that would begin the reasoning, until the first token; else None.
    """

    def __init__(self, reasoning: Reasoning, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ends = [text.encode() for text in reasoning.ends]
        self._longest_bytes = max(map(len, self._ends))
        self._held, self._passed = b"", 0
        self._read = 0
        self._begin: int | None = None
        self._rest: list[int] = []
        self.start: int | None = None
        if reasoning.start:
            tag = tokenizer.tokenize_str(reasoning.start, parse_special=True)
            self._begin = 0
            self.start = tag[0] if len(tag) == 1 else None

    def behind(self, output: Sequence[int]) -> list[int] | None:
        """Return the tokens for the grammar; None during the reasoning.

        If the token that ends the reasoning has further text, the tokens of this text come first.

        :param output: all tokens so far, which begin with those of the previous call.
        """
        if self.start is not None and len(output):
            if output[0] == self.start:
                self._begin, self._read = None, 1
            self.start = None
        if self._begin is None:
            self._look_for_end(output)
        if self._begin is None:
            return None
        return [*self._rest, *output[self._begin :]]

    def _look_for_end(self, output: Sequence[int]) -> None:
        while self._begin is None and self._read < len(output):
            self._held += self._tokenizer.decode_bytes([output[self._read]])
            self._read += 1
            self._pass_ends()
            self._held = self._held[max(0, len(self._held) - self._longest_bytes) :]

    def _pass_ends(self) -> None:
        """Find the ends, in order, in the held bytes."""
        while (at := self._held.find(self._ends[self._passed])) >= 0:
            self._held = self._held[at + len(self._ends[self._passed]) :]
            self._passed += 1
            if self._passed == len(self._ends):
                self._begin = self._read
                # Blanks after the reasoning are not part of the answer.
                self._rest = self._tokenizer.tokenize_bytes(self._held.lstrip())
                return

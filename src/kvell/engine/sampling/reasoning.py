"""Where the reasoning of an answer ends, and so where its grammar begins.

::

    undecided ──its start──────────► inside ──the last of its ends──► over
        └──────any other token────────────────────────────────────────►

Ends are looked for in the bytes of the output, as the front looks for them in its text: a tag may
be several tokens, and a token may hold the end of a tag and more.  llguidance could read all of it
as one grammar; but then each token of the reasoning would need a mask, and none could end an
answer.
"""

from collections.abc import Sequence
from typing import Any

from kvell.engine.protocol.structured_outputs import Reasoning


class ReasoningReader:
    """Reads one answer up to the end of its reasoning; what follows is for the grammar.

    What it finds depends on the output alone, however it was cut into calls.

    :param tokenizer: llguidance's.
    :ivar start: the token that would begin the reasoning, while that is undecided; else None.
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
        """The tokens that the grammar must read; None while it does not hold.

        Where one token ends the reasoning and says more, the rest of it comes first, as tokens of
        its own.

        :param output: all tokens so far, which begin with those of the call before.
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
        """Note the ends in what is held, which are looked for one after the other."""
        while (at := self._held.find(self._ends[self._passed])) >= 0:
            self._held = self._held[at + len(self._ends[self._passed]) :]
            self._passed += 1
            if self._passed == len(self._ends):
                self._begin = self._read
                # Blanks behind the reasoning are no part of the answer, for whoever reads it.
                self._rest = self._tokenizer.tokenize_bytes(self._held.lstrip())
                return

"""Compiled grammars, positions of answers and masks by llguidance, inside a worker."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from time import process_time
from typing import Any

from llguidance._lib import LLMatcher, LLParserLimits  # the package itself may import numpy

from kvell.engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from kvell.engine.sampling.grammar_process.messages import (
    DRAFTS_SECONDS,
    Checked,
    DraftMasks,
    Mask,
    Need,
)
from kvell.engine.sampling.grammar_process.sources import GrammarSource, source_of


class ReasoningReader:
    """A reader of one answer up to the end of its reasoning.

    ::

        undecided ──its start──────────► inside ──the last of its ends──► over
            └──────any other token────────────────────────────────────────►

    Ends are searched in the bytes of the output, as the front does in its text: a tag may be
    several tokens, and a token may hold the end of a tag and more.  llguidance could read all of it
    as one grammar, but then each token of the reasoning would need a mask, and none could end an
    answer.

    Its results depend on the output alone, not on the calls that pass it.

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
        while (at := self._held.find(self._ends[self._passed])) >= 0:
            self._held = self._held[at + len(self._ends[self._passed]) :]
            self._passed += 1
            if self._passed == len(self._ends):
                self._begin = self._read
                # Blanks after the reasoning are not part of the answer.
                self._rest = self._tokenizer.tokenize_bytes(self._held.lstrip())
                return


MAX_LEXER_STATES = 50_000
"""A limit above a worker's memory: a state takes 1 to 2 KiB."""


class Matchers:
    """Compiled grammars, and each answer's position in its grammar."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self.places: dict[int, _Place] = {}

    def check(self, constraint: StructuredOutputs) -> Checked:
        """Return a constraint's problem, and the keywords that it does not enforce.

        Some grammars prove too complex only at their first mask.
        """
        try:
            source = source_of(constraint.bare(), self._tokenizer)
        except ValueError as error:
            return Checked(str(error))
        if source.violation is not None:
            return Checked("", source.unfollowed, source.violation)
        matcher = self._compile(source)
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()
        return Checked(matcher.get_error(), source.unfollowed)

    def mask(self, need: Need) -> Mask:
        """Read new tokens of an answer; return the mask of the next token."""
        if need.asked is not None:
            self.places[need.number] = self._place(need.asked)
        return self.places[need.number].after(tokens_of(need.fresh))

    def draft_masks(self, need: Need) -> DraftMasks:
        """Read new tokens of an answer; return the masks after each of its draft tokens."""
        if need.asked is not None or need.fresh:
            self.mask(need)
        place = self.places[need.number]
        masks = place.ahead(tokens_of(need.drafts))
        if is_lost := place.is_lost:
            del self.places[need.number]
        return DraftMasks(masks, is_lost=is_lost)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.places.pop(number, None)

    def _place(self, constraint: StructuredOutputs) -> "_Place":
        bare = constraint.bare()
        reader = None
        if constraint.reasoning is not None:
            reader = ReasoningReader(constraint.reasoning, self._tokenizer)
        if bare not in self.compiled:
            self.compiled[bare] = self._compile(source_of(bare, self._tokenizer))
        return _Place(self.compiled[bare].deep_copy(), reader)

    def _compile(self, source: GrammarSource) -> Any:
        """Return a matcher at its start; an unsupported grammar gives a matcher with an error."""
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        return LLMatcher(self._tokenizer, source.grammar, log_level=0, limits=limits)


class _Place:
    """An answer's position in its grammar, or in the reasoning before it.

    :ivar is_lost: whether the matcher cannot go back from draft tokens to the position.
    """

    is_lost = False

    def __init__(self, matcher: Any, reader: ReasoningReader | None) -> None:
        self.matcher, self._reader = matcher, reader
        self._output: list[int] = []
        self._is_broken = False
        self._consumed = 0

    def ahead(self, drafts: Iterable[int]) -> tuple[Mask, ...]:
        """Return the masks after each draft token, up to a refused one; the position stays."""
        if self._is_broken or self.matcher.is_error():
            return ()
        until_seconds = process_time() + DRAFTS_SECONDS
        before = copy(self._reader), list(self._output), self._consumed
        masks = list[Mask]()
        for draft in drafts:
            mask = self.after([draft])
            if mask.kind == "stuck":
                break
            masks.append(mask)
            if process_time() > until_seconds:
                break
        if (consumed := self._consumed - before[2]) > 0:
            self.is_lost = not self.matcher.rollback(consumed)
        self.is_lost |= self.matcher.is_error()
        self._reader, self._output, self._consumed = before
        self._is_broken = False
        return tuple(masks)

    def after(self, fresh: list[int]) -> Mask:
        """Read new tokens; return the mask of the next one."""
        if self._reader is None:
            return self._mask(fresh)
        self._output += fresh
        behind = self._reader.behind(self._output)
        if behind is None:
            return Mask("free")
        if (start := self._reader.start) is None:  # from now on, only the grammar reads tokens
            self._reader, self._output = None, []
        return self._mask(behind, start)

    def _mask(self, fresh: list[int], also: int | None = None) -> Mask:
        matcher = self.matcher
        if fresh and not matcher.is_stopped():
            consumed = matcher.try_consume_tokens(fresh)
            self._consumed += consumed
            self._is_broken |= consumed < len(fresh) and not matcher.is_stopped()
        if self._is_broken or matcher.is_error():
            return Mask("stuck")
        if matcher.is_stopped():
            return Mask("over", also=also)
        bits: bytes = matcher.compute_bitmask()
        return Mask("stuck") if matcher.is_error() else Mask("bits", bits, also)


def tokens_of(packed: bytes) -> list[int]:
    """Return the token ids of little-endian int32 bytes."""
    view: Sequence[int] = memoryview(packed).cast("i")
    return list(view)

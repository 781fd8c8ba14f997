"""Conversion of one answer's tokens to text, up to its end: a stop string, or a token."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class StopStrings:
    """Watcher of one request's text.

    The stop string that is completed first ends the text; of several completed at the same
    character, the longest counts. So the result does not depend on how the text was split into
    pushes::

        watching ──stop string complete──► stopped (returns no more text)

    :ivar found: the stop string that ended the text; None while none has.
    """

    def __init__(self, stops: tuple[str, ...], *, includes: bool = False) -> None:
        """Take stop strings, none of them empty; without any, text passes through.

        :param includes: whether the text ends after the stop string instead of before it.
        """
        self._stops, self._includes = stops, includes
        self._held = ""
        self._passed = 0  # characters of the held text in which no stop string ends
        self.found: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return final text, and whether the text ends there.

        :param may_end: whether a stop string that is completed in ``text`` ends it.
        """
        if self.found is not None:
            return "", True
        pending = self._held + text
        stop = self._first_stop(pending) if may_end else None
        if stop is not None:
            end, start = stop
            self.found = pending[start:end]
            self._held = ""
            return pending[: end if self._includes else start], True
        keep = self._possible_start(pending)
        self._held = pending[keep:]
        self._passed = len(self._held) if not may_end else max(0, self._passed - keep)
        return pending[:keep], False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Return end and start of the stop string that is completed first; None if none is."""
        passed = self._passed
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop, max(0, passed - len(stop) + 1))) >= 0
        ]
        return min(matches, default=None)

    def _possible_start(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


Preceding = Sequence[int] | npt.NDArray[np.int32]
"""Tokens before an answer."""


class Detokenizer(Protocol):
    """A converter of one request's output tokens to text, which never splits a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return text that is final with these tokens added."""
        ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class EndTokens:
    """Tokens that end an answer.

    :param sequence: the model's own ends of a sequence, unless the request ignores them.
    :param asked: those that the request names.
    :param are_shown: whether the end of the answer is a part of its text, a stop string too.
    """

    sequence: Set[int] = frozenset()
    asked: Set[int] = frozenset()
    are_shown: bool = False


class AnswerText:
    """One answer's text, from its tokens; after ``stopped`` it takes no more.

    :param stops: the request's stop strings; may be empty.
    :param min_tokens: the number of tokens in whose text no stop string ends the answer.
    :ivar stopped: whether a stop string has ended the text.
    :ivar token_count: tokens up to that end.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        ends: EndTokens,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer, self._ends = detokenizer, ends
        self._min_tokens = min_tokens
        self._watcher = StopStrings(tuple(stops), includes=ends.are_shown) if stops else None
        self._silent: Set[int] = frozenset() if ends.are_shown else ends.sequence | ends.asked
        self._last: int | None = None
        self.stopped = False
        self.token_count = 0

    @property
    def stop_reason(self) -> str | int | None:
        """The request's stop string or token that ended the answer, once it has ended by itself.

        None for the model's own end of a sequence.
        """
        if self.stopped:
            return None if self._watcher is None else self._watcher.found
        is_asked = self._last in self._ends.asked and self._last not in self._ends.sequence
        return self._last if is_asked else None

    def push(self, token_ids: Sequence[int]) -> str:
        # One by one only if it matters which token completed a stop string.
        steps = [token_ids] if self._watcher is None else [[token] for token in token_ids]
        texts = []
        for step in steps:
            if self.stopped or not step:
                break
            self.token_count += len(step)
            self._last = step[-1]
            text = self._detokenizer.push([token for token in step if token not in self._silent])
            texts.append(text if self._watcher is None else self._match(text, self._watcher))
        return "".join(texts)

    def finish(self) -> str:
        """Return the rest of the text, once no token will follow."""
        if self.stopped:
            return ""
        text = self._detokenizer.finish()
        if self._watcher is None:
            return text
        text = self._match(text, self._watcher)
        return text if self.stopped else text + self._watcher.finish()

    def _match(self, text: str, watcher: StopStrings) -> str:
        may_end = self.token_count > self._min_tokens
        text, self.stopped = watcher.push(text, may_end=may_end)
        return text

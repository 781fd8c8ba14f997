"""Stop strings, which end a text; a text that may become one is held back."""


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
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text; None until then."""
        return self._found

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return final text, and whether the text ends there.

        :param may_end: whether a stop string that is completed in ``text`` ends it.
        """
        if self._found is not None:
            return "", True
        pending = self._held + text
        stop = self._first_stop(pending) if may_end else None
        if stop is not None:
            end, start = stop
            self._found = pending[start:end]
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

"""Ends a text before the first stop string; holds back text that may become one."""


class StopStrings:
    """Watches one request's text.

    The stop string that is completed first ends the text; of several completed at
    the same character, the longest counts.  So the result does not depend on how
    the text was split into pushes::

        watching ──stop string complete──► stopped (returns no more text)

    :ivar found: the stop string that ended the text; None while none has.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Take stop strings, none of them empty; without any, text passes through."""
        self._stops = stops
        self._held = ""
        self._stopped = False
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Return text that may be given out, and whether the text ends there."""
        if self._stopped:
            return "", True
        pending = self._held + text
        end = self._stop_start(pending)
        if end is not None:
            start, self.found = end
            self._stopped, self._held = True, ""
            return pending[:start], True
        keep = self._possible_start(pending)
        self._held = pending[keep:]
        return pending[:keep], False

    def finish(self) -> str:
        """Return the text held back for a stop string that was not completed."""
        held, self._held = self._held, ""
        return held

    def _stop_start(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that is completed first begins, and which; None if none is."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        return min(found)[1:] if found else None

    def _possible_start(self, text: str) -> int:
        """The earliest position from which the rest of the text may grow into a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)

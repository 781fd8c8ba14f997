"""Whether a request whose instance ended is tried again: pure decisions.

::

    first death ──killed, cut──► again
        └──────────crash───────► again, on probation
    on probation: the only suspect until its next token; if the instance crashes, it is refused
"""

from dataclasses import dataclass

from kvell.server.instance.death import BLAMELESS, Cause

MOST_RETRIES = 2


@dataclass
class Attempts:
    """What a request went through.

    :ivar deaths: instances that ended while they had it.
    :ivar alone: of these, how many ended by a fault of their own while they had nothing else.
    :ivar on_probation: whether it is under suspicion; it runs beside no other suspect.
    """

    deaths: int = 0
    alone: int = 0
    on_probation: bool = False

    def after(self, cause: Cause, *, sole: bool) -> str | None:
        """Count a death; returns why there is no further attempt, or None if there is one.

        An instance that was taken out of service counts as none.

        :param sole: whether the instance had no other request.
        """
        if cause == "drained":
            return None
        self.deaths += 1
        self.alone += sole and cause not in BLAMELESS
        if self.deaths > MOST_RETRIES:
            return f"its instance ended {self.deaths} times, and a request is retried twice"
        if self.alone > 1 or (self.on_probation and cause == "crash"):
            return "two instances ended while they computed it, so it is not tried on a third"
        self.on_probation = cause == "crash" or self.deaths == MOST_RETRIES
        return None

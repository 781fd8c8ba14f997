"""Which instances have computed a session's texts, as far as the front remembers.

A request whose session was elsewhere first pulls what is cached there: reading pages of another
instance is quicker than computing them again.  Source: MemServe §6.2, equation 2, of which this is
the case that always pays; what an instance still has, it says itself.
"""

from collections import OrderedDict
from collections.abc import Iterable

MOST_SESSIONS = 65_536
"""Sessions to remember; those that were not heard of for longest are forgotten."""
FEWEST_TOKENS = 64
"""Prompts below this are computed sooner than anybody is asked."""


class Histories:
    """Where sessions were, the latest instance last; pure."""

    def __init__(self, most_sessions: int = MOST_SESSIONS) -> None:
        self._most_sessions = most_sessions
        self._instances: OrderedDict[str, dict[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def note(self, session: str, instance_id: str, incarnation: int) -> None:
        """An incarnation of an instance computes a text of a session, or has got it."""
        if not session:
            return
        known = self._instances.setdefault(session, {})
        known.pop(instance_id, None)
        known[instance_id] = incarnation
        self._instances.move_to_end(session)
        if len(self._instances) > self._most_sessions:
            self._instances.popitem(last=False)

    def source(
        self, session: str, prompt_tokens: int, chosen: str, open_lines: Iterable[tuple[str, int]]
    ) -> str:
        """The instance that a request should ask for its history; "" for none.

        :param chosen: the instance that computes it.
        :param open_lines: instances that serve, with their incarnations.
        """
        known = self._instances.get(session)
        if known is None or prompt_tokens < FEWEST_TOKENS:
            return ""
        live = dict(open_lines)
        still = [name for name, incarnation in known.items() if live.get(name) == incarnation]
        return "" if chosen in still or not still else still[-1]

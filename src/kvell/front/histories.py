"""The instances that have computed a session's texts, as far as the front remembers.

A request whose session was elsewhere first fetches what is cached there, because reading pages of
another instance is faster than computing them again.  Source: MemServe §6.2, equation 2, of which
this is the case that always pays; the other instance itself reports what it still has.
"""

from collections import OrderedDict
from collections.abc import Iterable

MOST_SESSIONS = 65_536
"""Most sessions to remember; the least recently used ones are forgotten."""
FEWEST_TOKENS = 64
"""Shorter prompts are computed faster than fetched."""


class Histories:
    """The instances of each session, the latest one last; pure."""

    def __init__(self, most_sessions: int = MOST_SESSIONS) -> None:
        self._most_sessions = most_sessions
        self._instances: OrderedDict[str, dict[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def note(self, session: str, instance_id: str, incarnation: int) -> None:
        """Note that an incarnation of an instance computes, or receives, a text of a session."""
        if not session:
            return
        instances = self._instances.setdefault(session, {})
        instances.pop(instance_id, None)
        instances[instance_id] = incarnation
        self._instances.move_to_end(session)
        if len(self._instances) > self._most_sessions:
            self._instances.popitem(last=False)

    def source(
        self, session: str, prompt_tokens: int, chosen: str, open_lines: Iterable[tuple[str, int]]
    ) -> str:
        """Return the instance to fetch a request's history from; "" for none.

        :param chosen: the instance that computes the request.
        :param open_lines: instances that serve, with their incarnations.
        """
        instances = self._instances.get(session)
        if instances is None or prompt_tokens < FEWEST_TOKENS:
            return ""
        live = dict(open_lines)
        still = [name for name, incarnation in instances.items() if live.get(name) == incarnation]
        return "" if chosen in still or not still else still[-1]

"""The instances that have computed a session's texts, as far as the front remembers.

A request whose session was elsewhere first fetches what is cached there, because reading pages of
another instance is faster than computing them again.  Source: MemServe §6.2, equation 2, of which
this is the case that always pays; the other instance itself reports what it still has.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

MOST_SESSIONS = 65_536
"""Most sessions to remember; the least recently used ones are forgotten."""
FEWEST_TOKENS = 64
"""Shorter prompts are computed faster than fetched."""


class HeldSession(NamedTuple):
    """The texts of a session at one instance.

    :param tokens: of the latest one, as far as the front has seen it.
    """

    incarnation: int
    tokens: int


class Histories:
    """The instances of each session, the latest one last; pure."""

    def __init__(self, most_sessions: int = MOST_SESSIONS) -> None:
        self._most_sessions = most_sessions
        self._instances: OrderedDict[str, dict[str, HeldSession]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def note(self, session: str, instance_id: str, incarnation: int, tokens: int) -> None:
        """Note that an incarnation of an instance computes, or receives, a text of a session.

        :param tokens: of the text.
        """
        if not session:
            return
        instances = self._instances.setdefault(session, {})
        instances.pop(instance_id, None)
        instances[instance_id] = HeldSession(incarnation, tokens)
        self._instances.move_to_end(session)
        if len(self._instances) > self._most_sessions:
            self._instances.popitem(last=False)

    def source(self, session: str, prompt_tokens: int, chosen: str, live: Mapping[str, int]) -> str:
        """Return the instance to fetch a request's history from; "" for none.

        :param chosen: the instance that computes the request.
        :param live: instances that serve, with their incarnations.
        """
        still = self.tokens_at(session, live)
        if not still or prompt_tokens < FEWEST_TOKENS or chosen in still:
            return ""
        return list(still)[-1]

    def tokens_at(self, session: str, live: Mapping[str, int]) -> Mapping[str, int]:
        """Return the tokens of a session's texts by instance, the latest instance last.

        :param live: instances to look for, with their incarnations.
        """
        return {
            name: held.tokens
            for name, held in self._instances.get(session, {}).items()
            if live.get(name) == held.incarnation
        }

"""A cluster that a front joins, and who the front is there."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvell.server.front.line import Line
from kvell.server.joined.joined_members import JoinedMembers, KeyUses
from kvell.server.joined.manager_link import Find
from kvell.server.manager.messages import BEAT_SECONDS
from kvell.server.members.front_limits import FrontLimits
from kvell.server.members.member import INCARNATION_BITS, Told

NAME_BYTES = 4


def _drawn_name() -> str:
    return f"front-{secrets.token_hex(NAME_BYTES)}"


@dataclass(frozen=True)
class JoinedCluster:
    """:class:`.Joins` of a front: its name is drawn, so that no other front has the same.

    :param find: tells where the cluster's manager is; asked whenever it is connected to.
    :param incarnation: of the front, likewise drawn.
    :param beat_seconds: between two signs of life to the manager.
    :param key_uses: shares what keys use with the other fronts; None: each front counts alone.
    """

    find: Find
    name: str = field(default_factory=_drawn_name)
    incarnation: int = field(default_factory=lambda: secrets.randbits(INCARNATION_BITS))
    beat_seconds: float = BEAT_SECONDS
    key_uses: KeyUses | None = None

    def members(self, limits: FrontLimits, told: Told, lines: Mapping[str, Line]) -> JoinedMembers:
        """See :class:`.Joins`."""
        return JoinedMembers(self, limits, told, lines)

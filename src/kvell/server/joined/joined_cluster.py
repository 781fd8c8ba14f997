"""A cluster that a front joins."""

from collections.abc import Mapping

from kvell.server.front.line import Line
from kvell.server.joined.joined_members import JoinedMembers, JoiningFront
from kvell.server.members.front_limits import FrontLimits
from kvell.server.members.member import Told


class JoinedCluster(JoiningFront):
    """:class:`.Joins` of a front."""

    def members(self, limits: FrontLimits, told: Told, lines: Mapping[str, Line]) -> JoinedMembers:
        """See :class:`.Joins`."""
        return JoinedMembers(self, limits, told, lines)

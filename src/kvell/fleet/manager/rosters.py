"""A roster out of what the manager knows of its instances; pure."""

from collections.abc import Collection, Iterable, Mapping

from kvell.cluster.steering.roles import OTHER, RoleView
from kvell.fleet.manager.messages import Ended, RosterEntry
from kvell.fleet.started.members import OwnMember


def entries(
    members: Iterable[OwnMember],
    leaving: Collection[str],
    roles: Mapping[str, str],
    endings: Mapping[str, Ended],
) -> tuple[RosterEntry, ...]:
    """What fronts are told of every instance, in the order of ``members``.

    :param leaving: instances that are being taken out of service, which may not show yet.
    :param roles: of those that do not have their first one.
    :param endings: how the last incarnation of each ended, if one did.
    """
    return tuple(
        _entry(one, one.instance_id in leaving, roles, endings.get(one.instance_id))
        for one in members
    )


def role_views(told: Iterable[RosterEntry], loads: Mapping[str, int]) -> list[RoleView]:
    """The instances whose role may change: those that serve, and do a part of the work.

    :param loads: the work that they have still to do, by id; none is 0.
    """
    return [
        RoleView(one.instance_id, role, loads.get(one.instance_id, 0))
        for one in told
        for role in OTHER
        if one.state == "serving" and one.role == role
    ]


def _entry(
    member: OwnMember, is_leaving: bool, roles: Mapping[str, str], ended: Ended | None
) -> RosterEntry:
    one = member.supervisor
    return RosterEntry(
        member.instance_id,
        roles.get(member.instance_id, member.role),
        "draining" if is_leaving and one.state == "serving" else one.state,
        member.incarnation,
        one.address,
        one.host,
        one.pid or 0,
        one.restarts,
        ended,
    )

"""Roster entries, made from the manager's instances; pure."""

from collections.abc import Collection, Iterable, Mapping

from kvell.fleet.manager.messages import Ended, RosterEntry
from kvell.fleet.started.members import OwnMember


def entries(
    members: Iterable[OwnMember],
    leaving: Collection[str],
    roles: Mapping[str, str],
    endings: Mapping[str, Ended],
) -> tuple[RosterEntry, ...]:
    """Return the roster entries of all instances, in the order of ``members``.

    :param leaving: instances that are being taken out of service; their state may not show it yet.
    :param roles: of instances that no longer have their first role.
    :param endings: the end of each instance's last incarnation, if one has ended.
    """
    return tuple(
        _entry(member, member.instance_id in leaving, roles, endings.get(member.instance_id))
        for member in members
    )


def _entry(
    member: OwnMember, is_leaving: bool, roles: Mapping[str, str], ended: Ended | None
) -> RosterEntry:
    supervisor = member.supervisor
    return RosterEntry(
        member.instance_id,
        roles.get(member.instance_id, member.role),
        "draining" if is_leaving and supervisor.state == "serving" else supervisor.state,
        member.incarnation,
        supervisor.address,
        supervisor.host,
        supervisor.pid or 0,
        supervisor.restarts,
        ended,
    )

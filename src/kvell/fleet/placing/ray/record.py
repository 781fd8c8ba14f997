"""The record of the bundle that each instance has, and of what an earlier manager has left.

The record is written before Ray is asked for a group, and again before a bundle is given to another
instance.  So a manager that is killed at any moment leaves nothing that the next one does not find.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from kvell.fleet.placing.ray.names import LauncherName
from kvell.wire.decoding import decode


class Bundle(msgspec.Struct, frozen=True):
    """A part of a placement group, which one instance has."""

    group: str
    index: int


Record = dict[str, Bundle]
"""Bundles by instance."""
_DECODER = msgspec.msgpack.Decoder(Record)


def decode_record(body: bytes | None) -> Record:
    """Decode a record; none was written for a cluster that is new."""
    return {} if body is None else decode(_DECODER, body, "record")


@dataclass(frozen=True)
class Group:
    """A placement group that Ray has.

    :param is_placed: whether Ray has found machines for it, though some may have died since.
    """

    name: str
    bundles: int
    is_placed: bool


@dataclass(frozen=True)
class Remains:
    """Reservations and launchers that an earlier manager has left, sorted out.

    :param unreserved: instances that were to be placed and have no room yet, with the bundles that
        they would have had.
    :param free: bundles of kept groups that no instance has.
    """

    kept: Record = field(default_factory=dict)
    unreserved: Record = field(default_factory=dict)
    free: list[Bundle] = field(default_factory=list)
    stray_groups: list[str] = field(default_factory=list)
    stray_launchers: list[LauncherName] = field(default_factory=list)


def sorted_out(
    record: Mapping[str, Bundle],
    groups: Collection[Group],
    launchers: Collection[LauncherName],
) -> Remains:
    """Decide what becomes of the groups and launchers of an earlier manager.

    Without any launcher in its bundle no instance was ever started: all is given back, and the
    cluster starts as if it were new.
    """
    placed = {group.name: group for group in groups if group.is_placed}
    kept = {name: bundle for name, bundle in record.items() if bundle.group in placed}
    at_home = [
        name for name in launchers if kept.get(name.instance_id) == Bundle(name.group, name.index)
    ]
    if not at_home:
        return Remains(
            stray_groups=[group.name for group in groups], stray_launchers=list(launchers)
        )
    used = {bundle.group for bundle in kept.values()}
    every = [Bundle(name, index) for name in sorted(used) for index in range(placed[name].bundles)]
    taken = set(kept.values())
    return Remains(
        kept,
        unreserved={name: bundle for name, bundle in record.items() if name not in kept},
        free=[bundle for bundle in every if bundle not in taken],
        stray_groups=[group.name for group in groups if group.name not in used],
        stray_launchers=[name for name in launchers if name not in at_home],
    )

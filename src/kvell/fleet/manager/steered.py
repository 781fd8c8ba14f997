"""The manager's input to decisions: reports of instances, and beats of fronts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvell.cluster.instance_load import InstanceLoad, Movable
from kvell.cluster.steering.steering import Orders, Steering
from kvell.engine.protocol.statistics import InstanceReport
from kvell.fleet.manager.messages import FrontBeat, MoveRequest, RosterEntry
from kvell.serving.gate import NAME_END

SETTLING_LOOKS = 2
"""Number of looks after which a front reports a move that it was ordered."""


class FleetSteering:
    """The steering of all instances, from the beats of all fronts together; pure."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self._beats: dict[str, FrontBeat] = {}

    def on_beat(self, front: str, beat: FrontBeat) -> None:
        self._beats[front] = beat

    def decide(
        self,
        entries: Sequence[RosterEntry],
        reports: Mapping[str, InstanceReport],
        loads: Mapping[str, int],
        living: Iterable[str],
        now_seconds: float,
        epoch: int,
    ) -> Orders:
        """Decide on roles and moves of the instances that serve.

        :param loads: remaining work of instances for all fronts together; a missing one is 0.
        :param living: fronts whose lease is valid; beats of others are dropped.
        """
        self._beats = {front: self._beats[front] for front in living if front in self._beats}
        instances = self.members(entries, reports, loads)
        return self._steering.decide(instances, self._movable, now_seconds, epoch)

    def members(
        self,
        entries: Iterable[RosterEntry],
        reports: Mapping[str, InstanceReport],
        loads: Mapping[str, int],
    ) -> list[InstanceLoad]:
        """Return the instances that serve, in the order of the entries.

        While one has sent no heartbeat, its memory counts as neither short nor free.
        """
        leaving: Counter[str] = Counter()
        coming: Counter[str] = Counter()
        for beat in self._beats.values():
            coming.update(beat.coming)
            leaving.update({name: pressed.leaving for name, pressed in beat.pressed.items()})
        members: list[InstanceLoad] = []
        for entry in entries:
            name = entry.instance_id
            if entry.state != "serving" or name not in reports:
                continue
            member = InstanceLoad(name, entry.role)
            member.fronts_work = loads.get(name, 0)
            member.fronts_leaving, member.fronts_coming = leaving[name], coming[name]
            member.on_report(reports[name])
            members.append(member)
        return members

    def messages(self, orders: Orders) -> list[tuple[str, MoveRequest]]:
        messages = []
        for move in orders.moves:
            front, _, _ = move.request_id.rpartition(NAME_END)
            for name, beat in self._beats.items():
                pressed = beat.pressed.get(move.source)
                movable = () if pressed is None else pressed.movable
                if name == front or any(
                    request.request_id == move.request_id for request in movable
                ):
                    order = MoveRequest(orders.epoch, move.request_id, move.target, move.num_blocks)
                    messages.append((name, order))
        return messages

    def _movable(self, instance_id: str) -> list[Movable]:
        """Return the requests of all fronts that could leave an instance, the youngest last.

        Clocks of fronts differ, so the smallest counts as the youngest.
        """
        pressed = [beat.pressed.get(instance_id) for beat in self._beats.values()]
        movable = [request for each in pressed if each is not None for request in each.movable]
        return sorted(movable, key=lambda request: (-request.size_bytes, request.request_id))

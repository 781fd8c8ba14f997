"""The manager's input to decisions: reports of instances, and beats of fronts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvell.cluster.steering.relief import MovableView
from kvell.cluster.steering.steering import Orders, Steering
from kvell.engine.protocol.statistics import InstanceReport
from kvell.fleet.manager.messages import FrontBeat, MoveRequest, RosterEntry
from kvell.serving.gate import NAME_END

SETTLING_LOOKS = 2
"""Number of looks after which a front reports a move that it was ordered."""


@dataclass(frozen=True)
class SteeredMember:
    """A serving instance, by its own report and the beats of all fronts.

    While it has sent no heartbeat, its memory counts as neither short nor free.

    :param work: remaining work of its role for all fronts together.
    :param num_leaving: number of requests that are moving away; ``num_coming``, there.
    """

    entry: RosterEntry
    report: InstanceReport
    work: int = 0
    num_leaving: int = 0
    num_coming: int = 0

    @property
    def instance_id(self) -> str:
        return self.entry.instance_id

    @property
    def role(self) -> str:
        return self.entry.role

    @property
    def waiting(self) -> int:
        """Number of requests that hold no pages there."""
        return self.report.load.waiting if self.report.load else 0

    @property
    def memory_waiting(self) -> int:
        return self.report.load.memory_waiting if self.report.load else 0

    @property
    def free_bytes(self) -> int:
        return self.report.load.free_bytes if self.report.load else 0

    @property
    def pool_bytes(self) -> int:
        return self.report.load.pool_bytes if self.report.load else 0

    @property
    def can_take(self) -> bool:
        return self.report.load is not None and self.role != "prefill"


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

        :param reports: the latest report of each instance.
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
    ) -> list[SteeredMember]:
        """Return the instances that serve, in the order of the entries."""
        leaving: Counter[str] = Counter()
        coming: Counter[str] = Counter()
        for beat in self._beats.values():
            coming.update(beat.coming)
            leaving.update({name: pressed.leaving for name, pressed in beat.pressed.items()})
        return [
            SteeredMember(entry, reports[name], loads.get(name, 0), leaving[name], coming[name])
            for entry in entries
            if entry.state == "serving" and (name := entry.instance_id) in reports
        ]

    def messages(self, orders: Orders) -> list[tuple[str, MoveRequest]]:
        """Return the orders to fronts about the moves of their requests, each with its front."""
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

    def _movable(self, instance_id: str) -> list[MovableView]:
        """Return the requests of all fronts that could leave an instance, the youngest last.

        Clocks of fronts differ, so the smallest counts as the youngest.
        """
        pressed = [beat.pressed.get(instance_id) for beat in self._beats.values()]
        movable = [
            MovableView(request.request_id, request.size_bytes)
            for each in pressed
            if each is not None
            for request in each.movable
        ]
        return sorted(movable, key=lambda request: (-request.size_bytes, request.request_id))

"""The manager's input to decisions: heartbeats of instances, and beats of fronts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.placements import ContextLimits
from kvell.cluster.steering.relief import MemoryView, MovableView
from kvell.cluster.steering.steering import Orders, Steered, Steering
from kvell.engine.protocol.messages import Heartbeat, Ready
from kvell.fleet.manager.messages import FrontBeat, MoveRequest, RosterEntry
from kvell.fleet.manager.rosters import role_views
from kvell.serving.gate import NAME_END

SETTLING_LOOKS = 2
"""Number of looks after which a front reports a move that it was ordered."""


class FleetSteering:
    """The steering of all instances, from the beats of all fronts together; pure."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self._beats: dict[str, FrontBeat] = {}
        self._said: dict[str, tuple[Heartbeat, int]] = {}
        """The last heartbeat of each instance, and the number of different ones so far."""

    def on_beat(self, front: str, beat: FrontBeat) -> None:
        """Store a front's beat, in place of its last one."""
        self._beats[front] = beat

    def decide(
        self,
        entries: Sequence[RosterEntry],
        ready: Mapping[str, Ready],
        heartbeats: Mapping[str, Heartbeat],
        loads: Mapping[str, int],
        living: Iterable[str],
        now_seconds: float,
        epoch: int,
    ) -> Orders:
        """Decide on roles and moves of the instances that serve.

        :param ready: the ``Ready`` of each instance.
        :param heartbeats: the last heartbeat of each instance that has sent one.
        :param loads: work of all fronts together, as of :func:`.role_views`.
        :param living: fronts whose lease is valid; beats of others are dropped.
        """
        self._beats = {front: self._beats[front] for front in living if front in self._beats}
        self._said = {name: self._said[name] for name in heartbeats if name in self._said}
        parts = {view.instance_id: view for view in role_views(entries, loads)}
        leaving: Counter[str] = Counter()
        coming: Counter[str] = Counter()
        for beat in self._beats.values():
            coming.update(beat.coming)
            leaving.update({name: pressed.leaving for name, pressed in beat.pressed.items()})
        instances = []
        for entry in entries:
            name, heartbeat = entry.instance_id, heartbeats.get(entry.instance_id)
            if entry.state != "serving":
                continue
            if heartbeat is None:  # unknown memory: neither short nor with room
                memory = MemoryView(name, 0, 0, 0)
            else:
                memory = MemoryView(
                    *(name, heartbeat.waiting, heartbeat.free_bytes, heartbeat.pool_bytes),
                    *(leaving[name], coming[name]),
                )
            takes = heartbeat is not None and entry.role != "prefill"
            lending = self._lending(name, heartbeat, ready.get(name))
            instances.append(Steered(memory, parts.get(name), takes, lending))
        return self._steering.decide(instances, self._movable, now_seconds, epoch)

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

    def _lending(
        self, name: str, heartbeat: Heartbeat | None, ready: Ready | None
    ) -> LendingView | None:
        """Return what an instance has reported of loans; None before its first heartbeat."""
        if heartbeat is None or ready is None:
            return None
        before, count = self._said.get(name, (None, 0))
        if heartbeat is not before:
            count += 1
            self._said[name] = heartbeat, count
        return LendingView.of(heartbeat, count, ContextLimits.of(ready), ready.token_bytes)

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

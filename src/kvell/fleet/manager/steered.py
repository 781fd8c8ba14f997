"""What the manager decides from: what instances say of themselves, and fronts of their requests."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.placements import Reach
from kvell.cluster.steering.relief import MemoryView, MovableView
from kvell.cluster.steering.steering import Orders, Steered, Steering
from kvell.engine.protocol.messages import Heartbeat, Ready
from kvell.fleet.manager.messages import FrontBeat, MoveRequest, RosterEntry
from kvell.fleet.manager.rosters import role_views
from kvell.serving.gate import NAME_END

SETTLING_LOOKS = 2
"""A front that was told to move a request says within this many looks that it does."""


class FleetSteering:
    """Takes the beats of all fronts together, and says whose request is to move; pure.

    :param steering: decides.
    """

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self._beats: dict[str, FrontBeat] = {}
        self._said: dict[str, tuple[Heartbeat, int]] = {}
        """The last heartbeat of each instance, and how many different ones there were."""

    def heard(self, front: str, beat: FrontBeat) -> None:
        """Take in what a front has; it replaces what it said before."""
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
        """Decide on the instances that serve.

        :param ready: what they said at their start.
        :param heartbeats: the last of each instance that has said one.
        :param loads: work of all fronts together, as of :func:`.role_views`.
        :param living: fronts that are there; what the others had is over.
        """
        self._beats = {front: self._beats[front] for front in living if front in self._beats}
        self._said = {one: self._said[one] for one in heartbeats if one in self._said}
        parts = {one.instance_id: one for one in role_views(entries, loads)}
        leaving: Counter[str] = Counter()
        coming: Counter[str] = Counter()
        for beat in self._beats.values():
            coming.update(beat.coming)
            leaving.update({name: one.leaving for name, one in beat.pressed.items()})
        instances = []
        for entry in entries:
            name, said = entry.instance_id, heartbeats.get(entry.instance_id)
            if entry.state != "serving":
                continue
            if said is None:  # nothing is known of its memory: it has some, and no room
                memory = MemoryView(name, 0, 0, 0)
            else:
                memory = MemoryView(
                    *(name, said.waiting, said.free_bytes, said.pool_bytes),
                    *(leaving[name], coming[name]),
                )
            takes = said is not None and entry.role != "prefill"
            lending = self._lending(name, said, ready.get(name))
            instances.append(Steered(memory, parts.get(name), takes, lending))
        return self._steering.decide(instances, self._movable, now_seconds, epoch)

    def messages(self, orders: Orders) -> list[tuple[str, MoveRequest]]:
        """What each front is told of the moves of its requests."""
        told = []
        for move in orders.moves:
            front, _, _ = move.request_id.rpartition(NAME_END)
            for name, beat in self._beats.items():
                pressed = beat.pressed.get(move.source)
                movable = () if pressed is None else pressed.movable
                if name == front or any(one.request_id == move.request_id for one in movable):
                    order = MoveRequest(orders.epoch, move.request_id, move.target, move.num_blocks)
                    told.append((name, order))
        return told

    def _lending(
        self, name: str, said: Heartbeat | None, ready: Ready | None
    ) -> LendingView | None:
        """What an instance has said of loans; None before it says anything."""
        if said is None or ready is None:
            return None
        before, count = self._said.get(name, (None, 0))
        if said is not before:
            count += 1
            self._said[name] = said, count
        return LendingView.of(said, count, Reach.of(ready), ready.token_bytes)

    def _movable(self, instance_id: str) -> list[MovableView]:
        """Requests of all fronts there.  Clocks of fronts differ, so the smallest counts as the
        youngest."""
        pressed = [beat.pressed.get(instance_id) for beat in self._beats.values()]
        found = [
            MovableView(one.request_id, one.size_bytes)
            for each in pressed
            if each is not None
            for one in each.movable
        ]
        return sorted(found, key=lambda one: (-one.size_bytes, one.request_id))

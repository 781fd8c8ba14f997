"""The commands of a front to its instances: pure, and shared by the real and the virtual front.

Each input returns commands in order, each with its instance.  Submissions that an input makes
possible come last.
"""

from collections.abc import Iterable

from kvell.engine.protocol.messages import (
    Cancel,
    Event,
    Finished,
    Heartbeat,
    Migrate,
    MoveKvCache,
    Submit,
    Tokens,
)
from kvell.engine.protocol.notices import WatchIndex
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import FinishReason, RequestId

Command = Submit | Cancel | Migrate | MoveKvCache | WatchIndex
Commands = list[tuple[str, Command]]
"""Commands, each with its instance."""


class Dispatch:
    """The inputs of a front's queue, and the commands that follow from them.

    :ivar is_closing: whether no further request is submitted.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.is_closing = False

    def add(self, entry: LogEntry, now: float) -> Commands:
        """Add a request.

        :raises TryLater: when the queue is full.
        :raises ChangeSomething: when its id is already in use.
        """
        self.queue.add(entry)
        return self.submittable(now)

    def submittable(self, now: float) -> Commands:
        return [] if self.is_closing else [*self.queue.due(now)]

    def drop(self, request_id: RequestId, end_as: FinishReason, now: float) -> Commands:
        return [*self.queue.drop(request_id, end_as, now), *self.submittable(now)]

    def ready(
        self,
        instance_id: str,
        facts: InstanceFacts,
        now: float,
        *,
        joins_others: bool,
        watches: WatchIndex | None = None,
    ) -> Commands:
        """Open the line to an incarnation of an instance (:meth:`.RequestQueue.open`).

        :param watches: subscription for the instance, in place of the one that routing needs.
        """
        subscriptions = self.queue.open(instance_id, facts, joins_others=joins_others)
        if watches is not None:
            subscriptions = [(instance_id, watches)]
        return [*subscriptions, *self.submittable(now)]

    def on_events(self, instance_id: str, events: Iterable[Event], now: float) -> Commands:
        """Handle events of an instance."""
        commands: Commands = []
        kinds: set[type[Event]] = set()
        for event in events:
            commands += self.queue.on_event(instance_id, event, now)
            kinds.add(type(event))
        # A credit is free again, or a first token lets a new instance have more requests.
        frees = Finished in kinds or (Tokens in kinds and self.queue.waiting)
        if frees or (Heartbeat in kinds and self.queue.awaits_memory):
            commands += self.submittable(now)
        return commands

    def on_report(self, instance_id: str, now: float) -> Commands:
        commands: Commands = [*self.queue.on_report(instance_id, now)]
        return commands + self.submittable(now) if self.queue.awaits_memory else commands

    def lost(self, instance_id: str, death: InstanceDeath, now: float) -> Commands:
        cancels = self.queue.lost(instance_id, death, now)
        self.queue.refuse_too_long(now)  # perhaps another one was given up since they were placed
        return [*cancels, *self.submittable(now)]

    def on_given_up(self, instance_id: str, now: float) -> Commands:
        """Let no request wait for an instance; end those that the others can never hold."""
        self.queue.line(instance_id).will_serve = False
        self.queue.refuse_too_long(now)
        commands: Commands = []
        for entry, problem in list(self.queue.placements.outgrown(self.queue.entries().in_flight)):
            if not entry.is_dropped:
                entry.must_change = problem
                commands += self.drop(entry.request_id, "refused", now)
        return commands

    def leaving(self, instance_id: str, now: float) -> Commands:
        line = self.queue.line(instance_id)
        line.close()
        line.will_serve = False
        self.queue.refuse_too_long(now)
        return [*self.queue.evacuate(instance_id)]

"""Requests that leave this instance with their computed pages.

::

    ANNOUNCED ──computed up to its length──► MOVING, out of the steps ──pulled──► moved
        └─────────── no room there, the other side dies, too long ──┴──► it stays

A request in the CPU buffer is announced when it leaves, and its pages are read there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvell.engine.moving.encoding import encode_announcement, encode_handover, places_of
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.messages import Submit
from kvell.engine.requests.plan import StepPlan
from kvell.engine.requests.request import Request
from kvell.mempool.agent import Agent
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.methods import LayerPull, StreamCosts, pays_by_layer
from kvell.pages.stages import stages_of
from kvell.vocabulary import RequestId

HANDOVER_TICKS: Tick = 600_000
"""Longest time from a request's announcement until it is pulled, including time in the queue."""


@dataclass
class Departure:
    """A request that moves to another instance, or will move.

    :ivar length: number of announced tokens: the text that is computed when it moves.
    :ivar root: cache root of its prefix at the target.
    :ivar returns_to: the instance that gets its text when it has ended; "" for none.
    :ivar is_moving: whether it has left the steps.
    """

    request: Request
    length: int
    root: str
    returns_to: str
    is_moving: bool = False


class Departures:
    """The leaving requests of one engine core.

    :param streams: cost of pulls that begin before the pass has ended; None: no pull does.
    :ivar num_moving: the number of those that have left the steps.
    """

    def __init__(self, scheduler: Scheduler, agent: Agent, streams: StreamCosts | None) -> None:
        self._core, self._scheduler, self._agent = agent.core, scheduler, agent
        self._streams = streams
        self._departures: dict[Transfer, Departure] = {}
        self._transfers: dict[RequestId, Transfer] = {}
        self.num_moving = 0

    def __len__(self) -> int:
        return len(self._departures)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._transfers

    def get(self, transfer: Transfer) -> Departure | None:
        return self._departures.get(transfer)

    def begin(
        self, target: str, departure: Departure, command: Submit
    ) -> tuple[Transfer, list[Action]]:
        """Announce a request to another instance, which reserves pages for it."""
        request, now = departure.request, self._agent.now
        transfer, actions = self._agent.sending.begin(
            target,
            request.tokens(0, departure.length),
            departure.length,
            now,
            now + HANDOVER_TICKS,
            root=departure.root,
            model=request.model,
            inserts=False,
            private=encode_announcement(command, request),
            images=request.images,
        )
        self._departures[transfer] = departure
        self._transfers[request.request_id] = transfer
        return transfer, actions

    def offer_early(
        self, plan: StepPlan, requests: Sequence[Request]
    ) -> tuple[list[int], list[Action]]:
        """Offer the pages that a step completes, where pulling them meanwhile pays.

        :param requests: those of the plan's work.
        :returns: the numbers of the transfers that are pulled during the step.
        """
        numbers: list[int] = []
        actions: list[Action] = []
        if self._streams is None or not self._departures:
            return numbers, actions
        for work, request in zip(plan.work, requests, strict=True):
            transfer = self._transfers.get(request.request_id)
            if transfer is None or work.start + work.known != self._departures[transfer].length:
                continue
            stages = len(stages_of(self._core.layout.groups, request.model))
            missing = self._agent.sending.missing(transfer)
            groups = [self._core.layout.groups[group] for group, _ in missing]
            size_bytes = sum(group.page_stride_bytes for group in groups)
            pull = LayerPull(size_bytes, len(missing), stages, plan.num_tokens)
            if not work.samples or not pays_by_layer(pull, self._streams):
                continue
            early = self._agent.sending.early(transfer, places_of(self._core, request), stages)
            numbers += [transfer.number] if early else []
            actions += early
        return numbers, actions

    def on_computed(self, requests: Sequence[Request]) -> list[Action]:
        """Let the requests leave whose announced tokens a step has computed."""
        actions: list[Action] = []
        for request in requests:
            transfer = self._transfers.get(request.request_id)
            if transfer is None or request.finish_reason:
                continue
            departure = self._departures[transfer]
            is_complete = request.settled == departure.length < request.num_tokens
            if is_complete and not departure.is_moving:
                self._scheduler.lift(request)
                actions += self.leave(transfer)
        return actions

    def leave(self, transfer: Transfer) -> list[Action]:
        """Offer the pages of a request that was taken out of the steps."""
        departure = self._departures[transfer]
        request = departure.request
        departure.is_moving = True
        self.num_moving += 1
        handover = encode_handover(request, departure.root, departure.returns_to)
        places = self._scheduler.sent_places(request)
        if places is None:
            places = places_of(self._core, request)
        return self._agent.sending.ready(transfer, places, handover)

    def end(self, transfer: Transfer) -> Departure | None:
        """Forget the departure of a transfer that has ended; return it, if it was one."""
        departure = self._departures.pop(transfer, None)
        if departure is not None:
            del self._transfers[departure.request.request_id]
            self.num_moving -= departure.is_moving
        return departure

    def cancel(self, request: Request) -> list[Action]:
        transfer = self._transfers.get(request.request_id)
        if transfer is None:
            return []
        self.end(transfer)
        return self._agent.sending.cancel(transfer, "the request has ended")

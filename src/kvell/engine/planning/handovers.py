"""Requests that move between instances with what they have computed.

At the instance that computes a prompt (``Submit.goes_to``)::

    ANNOUNCED ──room there──► WAITING ──► RUNNING ──first token──► MOVING ──pulled──► moved
        │                        │            │                       │
        └──── no room there, the other side dies, too long ───────────┴──► it runs here

and at the other one: ``Prepare`` holds pages, and when the text has come a request begins with its
first tokens computed.  A request is its sender's until the receiver has all of it, so a death on
either side loses nothing that the other cannot go on with.  Pure: messages come in, and actions go
out (:mod:`kvell.mempool.transfers.actions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.messages import Submit
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, GroupSpec, MemoryCore
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Arrived, Ended, Roomed
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.receiving import owner_of
from kvell.vocabulary import RequestId

MOVABLE = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.STATE})
"""Kinds whose pages are all there is of the computed tokens."""
HANDOVER_TICKS: Tick = 600_000
"""How long a request may take from its announcement until it is pulled: prompts wait in line."""

_SUBMITS = msgspec.msgpack.Decoder(Submit)


class Carried(msgspec.Struct, frozen=True):
    """What goes with a request's pages: tokens behind those computed, and what it cost so far."""

    output: list[int]
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True)
class Come:
    """A request that has come, with its pages under a handle."""

    command: Submit
    carried: Carried
    computed: int
    handle: int


class Handovers:
    """The moving requests of one engine core.

    :param agent: of the instance, over the scheduler's memory core.
    """

    def __init__(self, core: MemoryCore, scheduler: Scheduler, agent: Agent) -> None:
        self._core, self._scheduler, self._agent = core, scheduler, agent
        self._going: dict[Transfer, Request] = {}
        self._transfers: dict[RequestId, Transfer] = {}
        self._lengths: dict[Transfer, int] = {}
        """Tokens that were announced: the text that is computed when a request moves."""
        self._announced: set[RequestId] = set()
        self._moving: set[RequestId] = set()
        self._actions: list[Action] = []
        agent.receiving.admits = scheduler.has_room_for

    @property
    def num_idle(self) -> int:
        """Requests that need no step: announced, or moving."""
        return len(self._announced) + len(self._moving)

    @property
    def holds_pages(self) -> bool:
        """Whether pages are held that are no running request's, and will be given back."""
        return bool(len(self._agent.holds) or self._moving)

    @property
    def next_deadline(self) -> Tick | None:
        """When :class:`Ticked` has something to do."""
        return self._agent.next_deadline

    def take_actions(self) -> list[Action]:
        """What is to be done, in order, before the next step is planned."""
        actions, self._actions = self._actions, []
        return actions

    def announce(self, request: Request, command: Submit) -> None:
        """Ask the other instance for room; the request waits until it is known."""
        tokens = request.tokens(0, request.num_tokens)
        told = replace(command, goes_to="")
        transfer, actions = self._agent.sending.begin(
            command.goes_to,
            tokens,
            len(tokens),
            self._agent.now,
            self._agent.now + HANDOVER_TICKS,
            root=request.cache_root,
            model=request.model,
            inserts=False,
            private=msgspec.msgpack.encode(told),
        )
        self._going[transfer] = request
        self._lengths[transfer] = len(tokens)
        self._transfers[request.request_id] = transfer
        self._announced.add(request.request_id)
        self._actions += actions

    def heard(self, entry: PeerEntry) -> tuple[list[Request], list[Come]]:
        """Take in what happened; returns requests that have moved, and those that came."""
        actions = self._agent.handle(entry)
        return self._sorted(actions)

    def computed(self, requests: Sequence[Request]) -> tuple[list[Request], list[Come]]:
        """A step's requests have their tokens: those whose prompt is computed begin to move."""
        actions: list[Action] = []
        for request in requests:
            transfer = self._transfers.get(request.request_id)
            if transfer is None or request.finish_reason or request.request_id in self._moving:
                continue
            if not request.settled == self._lengths[transfer] < request.num_tokens:
                continue
            self._scheduler.lift(request)
            self._moving.add(request.request_id)
            held = self._core.held_pages(request.handle)[:, 1:].tolist()
            places = {(group, position): page for group, position, page in held}
            beyond = request.tokens(request.computed, request.num_tokens).tolist()
            carried = Carried(beyond, request.cached_tokens or 0, request.preemptions)
            told = msgspec.msgpack.encode(carried)
            actions += self._agent.sending.ready(transfer, places, told)
        return self._sorted(actions)

    def ended(self, request: Request) -> None:
        """A request ends here, however: nobody may read its pages any more."""
        transfer = self._transfers.pop(request.request_id, None)
        if transfer is None:
            return
        del self._going[transfer], self._lengths[transfer]
        self._announced.discard(request.request_id)
        self._moving.discard(request.request_id)
        # Its own end is no news.
        actions = self._agent.sending.cancel(transfer, "the request has ended")
        self._actions += [action for action in actions if not isinstance(action, Ended)]

    def _sorted(self, actions: Sequence[Action]) -> tuple[list[Request], list[Come]]:
        """Act on what concerns requests; the rest is for those who do I/O."""
        moved: list[Request] = []
        came: list[Come] = []
        for action in actions:
            if isinstance(action, Roomed):
                self._enqueue(self._going[action.transfer])
            elif isinstance(action, Ended):
                moved += self._ended(action)
            elif isinstance(action, Arrived):
                came.append(self._come(action))
            else:
                self._actions.append(action)
        return moved, came

    def _enqueue(self, request: Request) -> None:
        if request.request_id in self._announced:
            self._announced.remove(request.request_id)
            self._scheduler.enqueue(request)

    def _ended(self, action: Ended) -> list[Request]:
        """A transfer is over: its request has moved, or stays."""
        request = self._going.pop(action.transfer)
        del self._lengths[action.transfer]
        del self._transfers[request.request_id]
        self._enqueue(request)
        if request.request_id not in self._moving:
            return []
        self._moving.remove(request.request_id)
        if not action.problem:
            return [request]
        self._scheduler.resume(request)
        return []

    def _come(self, action: Arrived) -> Come:
        command = _SUBMITS.decode(action.announced)
        carried = msgspec.msgpack.decode(action.private, type=Carried)
        handle = self._agent.holds.claim(owner_of(action.transfer))
        return Come(command, carried, action.computed, handle)


def staying_reason(request: Request, groups: Sequence[GroupSpec]) -> str:
    """Why a request is served where its prompt is computed; "" if it can move.

    Everything that cannot move is named here.
    """
    own = [group for group in groups if group.model == request.model]
    if request.image_rows:
        return "its images cannot be moved yet"
    if request.is_scored:
        return "how likely its prompt is, is told here"
    if request.pooling:
        return "it makes no tokens"
    if any(group.kind not in MOVABLE or group.is_draft for group in own):
        return "its model has pages that cannot be moved yet"
    return ""

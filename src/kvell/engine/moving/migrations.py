"""Requests that leave in the middle of their answer: copy, delta, switch.

::

    asked ──decodes──► COPYING ──all is there──► READY ──after a step──► moves, like any request
                          └── no room there, it dies, too long ──► stays

While what it has computed is copied, and cached there, the request goes on.  Then it is lifted
out of the steps, and moves with the little that has come since.  Source: Llumnix §4.1; DESIGN §9.
"""

from dataclasses import dataclass

from kvell.engine.requests.request import Request, RequestState
from kvell.mempool.agent import Agent
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.messages import Transfer
from kvell.vocabulary import RequestId

COPY_TICKS: Tick = 60_000
"""How long copying may take before the request stays."""


@dataclass
class _Leaving:
    """A request that is to leave.

    :ivar copy: what it has computed, on its way; None before, and when there was nothing to copy.
    """

    request: Request
    target: str
    copy: Transfer | None = None
    is_copied: bool = False


class Migrations:
    """Requests of one engine core that are to leave."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._leaving: dict[RequestId, _Leaving] = {}
        self._copies: dict[Transfer, RequestId] = {}

    def __len__(self) -> int:
        return len(self._leaving)

    def ask(self, request: Request, target: str) -> None:
        """Let a request leave for another instance; it stays if that has no room."""
        self._leaving[request.request_id] = _Leaving(request, target)

    def advance(self) -> list[Action]:
        """Begin to copy what requests have, once they decode; to be called between steps."""
        actions: list[Action] = []
        for leaving in self._leaving.values():
            is_new = leaving.copy is None and not leaving.is_copied
            if is_new and _is_between_steps(leaving.request):
                actions += self._begun(leaving)
        return actions

    def _begun(self, leaving: _Leaving) -> list[Action]:
        request, now = leaving.request, self._agent.now
        leaving.copy, actions = self._agent.copies.begin(
            leaving.target,
            request.tokens(0, request.settled),
            now,
            now + COPY_TICKS,
            root=request.cache_root,
            model=request.model,
        )
        if leaving.copy is None:
            leaving.is_copied = True  # all of it is delta
        else:
            self._copies[leaving.copy] = request.request_id
        return actions

    def copied(self, transfer: Transfer, problem: str) -> Request | None:
        """A copy has ended, if it was one of a request that leaves; returns one that stays."""
        leaving = self._leaving.get(self._copies.pop(transfer, RequestId("")))
        if leaving is None or leaving.copy != transfer:
            return None
        leaving.is_copied = not problem
        if not problem:
            return None
        return self._leaving.pop(leaving.request.request_id).request

    def take_ready(self) -> list[tuple[Request, str]]:
        """Requests that can switch now, each with where it goes; to be called between steps."""
        ready = [
            one
            for one in self._leaving.values()
            if one.is_copied and _is_between_steps(one.request)
        ]
        for one in ready:
            del self._leaving[one.request.request_id]
        return [(one.request, one.target) for one in ready]

    def forget(self, request: Request) -> None:
        """A request has ended, or leaves in another way; a copy goes on and is cached there."""
        self._leaving.pop(request.request_id, None)


def _is_between_steps(request: Request) -> bool:
    """Whether a request decodes, and no step computes it just now."""
    runs = request.state is RequestState.RUNNING and request.finish_reason is None
    return runs and request.is_decoding and request.settled == request.computed

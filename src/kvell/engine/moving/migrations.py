"""Live migration of requests in the middle of their answer: copy, delta, switch.

::

    asked ──decodes──► COPYING ──all is there──► READY ──after a step──► moves, like any request
                          └── no room there, it dies, too long ──► stays

The request runs on while its computed pages are copied to the target and cached there.  Then it
leaves the steps, and moves with the few tokens since.  A request in the CPU buffer is READY: it
computes nothing, so there is no copy, and it moves as it is.  Source: Llumnix §4.1; DESIGN §9.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvell.engine.requests.request import Request, RequestState
from kvell.mempool.agent import Agent
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.messages import Transfer
from kvell.vocabulary import RequestId

COPY_TICKS: Tick = 60_000
"""Longest time of a copy; after that, the request stays."""


@dataclass
class _Leaving:
    """A request that will leave.

    :ivar copy: transfer of its computed pages; None before, and if there was nothing to copy.
    """

    request: Request
    target: str
    copy: Transfer | None = None
    is_copied: bool = False


class Migrations:
    """The migrating requests of one engine core."""

    def __init__(self, agent: Agent, is_buffered: Callable[[Request], bool]) -> None:
        self._agent, self._is_buffered = agent, is_buffered
        self._leaving: dict[RequestId, _Leaving] = {}
        self._copies: dict[Transfer, RequestId] = {}

    def __len__(self) -> int:
        return len(self._leaving)

    def ask(self, request: Request, target: str) -> None:
        """Plan to migrate a request to ``target``; it stays if the target has no room."""
        self._leaving[request.request_id] = _Leaving(request, target)

    def advance(self) -> list[Action]:
        """Begin to copy the pages of requests that decode."""
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

    def on_copied(self, transfer: Transfer, problem: str, size_bytes: int) -> Request | None:
        """Record the end of a transfer; return its request if its copy failed, so that it stays.

        :param size_bytes: the copied pages.
        """
        leaving = self._leaving.get(self._copies.pop(transfer, RequestId("")))
        if leaving is None or leaving.copy != transfer:
            return None
        leaving.is_copied = not problem
        leaving.request.moved_bytes += size_bytes
        if not problem:
            return None
        return self._leaving.pop(leaving.request.request_id).request

    def take_ready(self, *, rests: bool) -> list[tuple[Request, str]]:
        """Return the requests that can switch now, with their targets.

        :param rests: whether no step runs: a step may write pages of the CPU buffer.
        """
        ready = [
            leaving
            for leaving in self._leaving.values()
            if (rests and self._is_buffered(leaving.request))
            or (leaving.is_copied and _is_between_steps(leaving.request))
        ]
        for leaving in ready:
            del self._leaving[leaving.request.request_id]
        return [(leaving.request, leaving.target) for leaving in ready]

    def forget(self, request: Request) -> None:
        """Forget a request that has ended or leaves otherwise; a copy that runs is completed."""
        self._leaving.pop(request.request_id, None)


def _is_between_steps(request: Request) -> bool:
    runs = request.state is RequestState.RUNNING and request.finish_reason is None
    return runs and request.is_decoding and request.settled == request.computed

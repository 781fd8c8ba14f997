"""Prompts whose KV is written to the CPU buffer while they are computed (eLLM §4.3.2); pure.

::

    WAITING ──no room in the pool, but in the buffer──► OFFLOADED ──first token──► PARKED
       ▲                                                    │                        │ fetched when
       └──────────── cancelled, finished ◄──────────────────┘                        ▼ it fits
                                                                                 RUNNING

The buffer is host memory after the pool, in the same range of addresses, so a pass writes each page
once, wherever the plan says that it is (Algorithm 1, lines 8-11): nothing is copied until the
decode is scheduled.  Only the activations of a step need room in the pool.

A request has its own pages for all groups of its model: it resumes from no cached prefix, and
publishes none before it has been fetched.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvell.cost.swap_rule import WAYS
from kvell.elastic.page_buffer import first_pages
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import SWAPPABLE, Swapping
from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.planning.seats import RequestQueues
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from kvell.memory import IMAGE_KINDS, GroupKind, MemoryCore

OFFLOADED_ROOT = "\0offloaded"
"""Cache root of a holder whose pages are in the buffer; nothing is ever cached under it."""


class OffloadedPrompts:
    """The prompts that are computed into the buffer.

    :param first_large: number of the buffer's first large page, counted from the pool's first.
    :ivar first_large: as given.
    :ivar count: number of prompts that began there.
    :ivar is_leaving: whether a request will move to another instance when its prompt is computed.
    """

    def __init__(
        self,
        core: MemoryCore,
        seats: RequestQueues,
        swapping: Swapping,
        parking: Parking,
        first_large: int,
    ) -> None:
        self.first_large = first_large
        self.count = 0
        self.is_leaving: Callable[[Request], bool] = lambda request: False
        self._core, self._seats = core, seats
        self._swapping, self._parking = swapping, parking
        self._groups = core.layout.groups
        self._first_page = first_pages(self._groups, first_large)

    def size_bytes(self, request: Request) -> int:
        """Return the bytes of a request's prompt in the buffer; 0 if it cannot be there now."""
        if not self._can_be_there(request):
            return 0
        need = self._need(request)
        size_bytes = self._swapping.buffer.size_bytes(need)
        fits = self._parking.allows(size_bytes) and self._swapping.fits_all(need)
        return size_bytes if fits else 0

    def pays(self, request: Request, leaving: Sequence[Request]) -> bool:
        """Return whether a prompt should be computed into the buffer.

        Its pages are copied once, when its decode is scheduled; those of parked requests twice.
        If the buffer is far, each chunk of the prompt also reads the chunks before it there.

        :param leaving: the requests that would be parked for it; empty if that is not possible.
        """
        size_bytes = self.size_bytes(request)
        parked_bytes = sum(map(self._swapping.size_bytes, leaving))
        chunks = -(-request.num_tokens // self._parking.chunk_tokens)
        reads = (chunks - 1) / 2 if self._swapping.buffer.is_far else 0.0
        return size_bytes > 0 and (not leaving or size_bytes * (1 + reads) <= WAYS * parked_bytes)

    def begin(self, request: Request, draft: PlanDraft) -> None:
        """Give a waiting request pages in the buffer for its whole prompt."""
        need = self._need(request)
        request.handle = self._core.open(
            request.prompt, OFFLOADED_ROOT, reuse=False, model=request.model
        )
        pages = self._swapping.take(request, need)
        rows = [
            (request.handle, group, position, self._first_page[group] + page)
            for group, some in enumerate(pages)
            for position, page in enumerate(some)
        ]
        draft.add_moved(np.asarray(rows, np.int32).reshape(-1, 4))
        self._parking.hold(request, self._swapping.buffer.size_bytes(need))
        request.computed = request.settled = request.found_tokens = 0
        request.state = RequestState.OFFLOADED
        self._seats.offloaded.append(request)
        self.count += 1

    def park_computed(self) -> None:
        """Park the requests whose prompts are computed, with their first token."""
        for request in [r for r in self._seats.offloaded if r.is_decoding and not r.drawing]:
            self._swapping.keep_computed(request)
            self._seats.leave_buffer(request)
            self._parking.add(request)

    def give_up(self, request: Request, draft: PlanDraft) -> None:
        """Let a request wait again that has just been given pages, without work in this step."""
        draft.forget(request)
        self._seats.leave_buffer(request)
        self._swapping.forget(request)
        self._parking.leave(request)
        self.count -= 1

    def _need(self, request: Request) -> list[int]:
        """Return the number of pages of each group for the prompt; of states, one for each part."""
        tokens = len(request.prompt)
        need: list[int] = []
        for group in self._groups:
            if group.model != request.model or group.kind in IMAGE_KINDS:
                need.append(0)
            elif group.kind is GroupKind.STATE:
                need.append(group.slices)
            else:
                need.append(-(-tokens // group.page_tokens))
        return need

    def _can_be_there(self, request: Request) -> bool:
        kinds = {group.kind for group in self._groups if group.model == request.model}
        is_plain = kinds <= SWAPPABLE | IMAGE_KINDS and not (
            request.spec.images or request.spec.pooling
        )
        is_new = request.handle == NO_HANDLE and not request.output and not request.runs_alone
        stays = not (request.local_tokens or request.remote_tokens or self.is_leaving(request))
        return is_plain and is_new and stays

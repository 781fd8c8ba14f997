"""Prefills before decodes: eLLM's Algorithm 1 if KV memory is short, sized by its Algorithm 2.

A prompt without room is computed anyway, if the CPU buffer's logical size allows it: the decodes
that arrived last move their pages to the buffer, or the prompt is computed into the buffer
(:mod:`kvell.engine.planning.chunks`), whichever moves fewer bytes.  Either way pages are copied
back when their decode is scheduled::

    RUNNING, decodes ──a prompt finds no room──► PARKED ──it fits, with room to grow──► RUNNING
         └────────────preempted, in the buffer─────▲

The request that arrived first decodes first: it is parked last and resumed first.  So a request is
parked about once, and the longest wait is as short as possible.  While the buffer's logical size is
used up, or the first parked request has waited long, parked requests resume before any prompt is
admitted: otherwise small prompts could forever take the pages that a large request waits for.
"""

from collections.abc import Collection, Sequence

from kvell.elastic.logical_buffer import CpuBuffer
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore, pool_bytes_for
from kvell.vocabulary import RequestId

ROOM_TOKENS = 64
"""Room needed to resume a parked request, in tokens per request; with less it soon leaves again."""

MOST_STEPS_PARKED = 16_384
"""Number of steps after which no prompt is admitted until the first parked request is resumed."""


class Parking:
    """The parked requests, and the choice of decodes to park.

    :param sizes: the buffer's logical size, in its large pages.
    :param chunk_tokens: of a prompt, in a step of which decodes are a part.
    :ivar parked: in order of arrival.
    :ivar count: number of times that a request was parked for a prompt.
    """

    def __init__(
        self, core: MemoryCore, swapping: Swapping, sizes: CpuBuffer, chunk_tokens: int
    ) -> None:
        self.parked: list[Request] = []
        self.sizes = sizes
        self.count = 0
        self.chunk_tokens = chunk_tokens
        self._core, self._swapping = core, swapping
        self._since: dict[RequestId, int] = {}
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step

    @property
    def comes_first(self) -> bool:
        if not self.parked:
            return False
        steps = self._step - self._since[self.parked[0].request_id]
        return not self.sizes.free_chunks or steps >= MOST_STEPS_PARKED

    def give_way(
        self, request: Request, running: Sequence[Request], admitted: Collection[RequestId]
    ) -> list[Request]:
        """Return the requests to park so that ``request`` gets pages and a seat, youngest first.

        Empty unless they free enough and the buffer may hold them.
        """
        need_bytes = self._missing_bytes(request)
        larges = 0
        chosen = list[Request]()
        for other in reversed(running):
            if need_bytes <= 0 and chosen:
                break
            if not other.is_decoding or other.request_id in admitted:
                continue
            size_bytes = self._swapping.size_bytes(other)
            larges += self._larges(size_bytes)
            if not size_bytes:
                return []
            if larges > self.sizes.free_chunks:
                self.sizes.note_refused(larges)
                return []
            chosen.append(other)
            need_bytes -= size_bytes
        is_enough = need_bytes <= 0 and bool(chosen)
        return chosen if is_enough and self._swapping.can_take(chosen) else []

    def allows(self, size_bytes: int) -> bool:
        larges = self._larges(size_bytes)
        if larges > self.sizes.free_chunks:
            self.sizes.note_refused(larges)
            return False
        return True

    def hold(self, request: Request, size_bytes: int) -> None:
        """Count a request's pages in the buffer, until it leaves."""
        self.sizes.hold(request.request_id, self._larges(size_bytes), whatever_size=True)

    def park(self, request: Request, size_bytes: int, *, gave_way: bool = True) -> None:
        """Park a request whose pages have been copied to the buffer.

        :param gave_way: whether it is parked for a prompt, rather than preempted.
        """
        self.count += gave_way
        self.hold(request, size_bytes)
        self.add(request)

    def add(self, request: Request) -> None:
        """Park a request whose pages are held in the buffer and counted (:meth:`hold`)."""
        self._since[request.request_id] = self._step
        place = len(self.parked)
        while place and self.parked[place - 1].number > request.number:
            place -= 1
        self.parked.insert(place, request)

    def lift(self, request: Request) -> None:
        """Let a request be resumed no more, if it is parked; its pages stay counted."""
        if self._since.pop(request.request_id, None) is not None:
            self.parked.remove(request)

    def leave(self, request: Request) -> None:
        self.sizes.release(request.request_id)
        self.lift(request)

    def clear(self) -> None:
        self.sizes.held.clear()
        self._since.clear()
        self.parked.clear()

    def _missing_bytes(self, request: Request) -> int:
        layout = self._core.layout
        is_shared = len({group.model for group in layout.groups}) > 1
        seen = layout.held_by(request.model) if is_shared else layout
        need_bytes = pool_bytes_for(seen, request.num_tokens, self.chunk_tokens)
        return need_bytes - self._core.empty_large_pages() * layout.large_page_bytes

    def _larges(self, size_bytes: int) -> int:
        return -(-size_bytes // self._core.layout.large_page_bytes)

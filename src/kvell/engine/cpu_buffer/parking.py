"""Prefills ahead of decodes: eLLM's Algorithm 1 where KV runs short, sized by its Algorithm 2.

A prompt that finds no room is computed all the same, if the CPU buffer's logical size allows:
whoever came last and decodes by now gives its pages to the buffer.  So the KV of a prefill goes
to the buffer behind its first token, unless somebody finishes meanwhile, and comes back when its
decode is scheduled::

    RUNNING, decodes ──a prompt finds no room──► PARKED ──it fits, with room to grow──► RUNNING
         └────────────preempted, in the buffer─────▲

Whoever came first decodes first: it is parked last and comes back first, so a request goes to the
buffer about once, and the longest wait is the shortest that can be had.  While the buffer may
hold no more, or the first has lain there for long, those in it come back before any prompt is
admitted: else small prompts could take for ever what a large request waits for.

Our pages hold all layers of a group, so pages are chosen by request and not by layer: a prompt
needs its pages on the device while it is computed.
"""

from collections.abc import Collection, Sequence

from kvell.elastic.logical_buffer import CpuBuffer
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore, pool_bytes_for
from kvell.vocabulary import RequestId

ROOM_TOKENS = 64
"""Who comes back finds room for so many tokens of everybody: else it would soon leave again."""

MOST_STEPS_PARKED = 16_384
"""After so many, no prompt is admitted until who came first is back."""


class Parking:
    """Who is parked, and who may be.

    :param sizes: the buffer's logical size, in its large pages.
    :ivar parked: in the order in which they came.
    :ivar count: how often anybody gave way.
    """

    def __init__(
        self, core: MemoryCore, swapping: Swapping, sizes: CpuBuffer, chunk_tokens: int
    ) -> None:
        self.parked: list[Request] = []
        self.sizes = sizes
        self.count = self._last_key = 0
        self._core, self._swapping, self._chunk_tokens = core, swapping, chunk_tokens
        self._keys: dict[RequestId, int] = {}
        self._since: dict[RequestId, int] = {}
        self._step = 0

    def begin(self, step: int) -> None:
        """The next step is planned."""
        self._step = step

    @property
    def comes_first(self) -> bool:
        """Must those that are parked come back before a prompt is admitted?"""
        if not self.parked:
            return False
        steps = self._step - self._since[self.parked[0].request_id]
        return not self.sizes.free_chunks or steps >= MOST_STEPS_PARKED

    def give_way(
        self, request: Request, running: Sequence[Request], admitted: Collection[RequestId]
    ) -> list[Request]:
        """Requests that may be parked so that this one finds pages and a seat, youngest first.

        None unless they are enough, and the buffer may hold them.

        :param running: in the order in which they came.
        """
        need_bytes, larges = self._missing_bytes(request), 0
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
        return chosen if is_enough and self._swapping.has_room(chosen) else []

    def park(self, request: Request, size_bytes: int, *, gave_way: bool = True) -> None:
        """The request's pages are in the buffer, so many bytes."""
        self.count += gave_way
        self._last_key += 1
        self.sizes.hold(self._last_key, self._larges(size_bytes), whatever_size=True)
        self._keys[request.request_id] = self._last_key
        self._since[request.request_id] = self._step
        place = len(self.parked)
        while place and self.parked[place - 1].number > request.number:
            place -= 1
        self.parked.insert(place, request)

    def leave(self, request: Request) -> None:
        """It runs again, or is over."""
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            del self._since[request.request_id]
            self.sizes.release(key)
            self.parked.remove(request)

    def _missing_bytes(self, request: Request) -> int:
        """What its prompt needs beside what is empty."""
        layout = self._core.layout
        is_shared = len({group.model for group in layout.groups}) > 1
        seen = layout.seen_by(request.model) if is_shared else layout
        need_bytes = pool_bytes_for(seen, request.num_tokens, self._chunk_tokens)
        return need_bytes - self._core.empty_large_pages() * layout.large_page_bytes

    def _larges(self, size_bytes: int) -> int:
        return -(-size_bytes // self._core.layout.large_page_bytes)

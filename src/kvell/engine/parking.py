"""Prefills ahead of decodes: eLLM's Algorithm 1 where KV runs short, sized by its Algorithm 2.

A prompt that does not fit is computed all the same, if the CPU buffer's logical size allows:
whoever was admitted last and decodes by now gives its pages to the buffer.  So the KV of a
prefill goes to the buffer behind its first token, unless somebody finishes meanwhile, and comes
back when its decode is scheduled::

    RUNNING, decodes ──a prompt does not fit──► PARKED ──it fits, with room to grow──► RUNNING

Our pages hold all layers of a group, so pages are streamed by request and not by layer: a prompt
needs its pages on the device while it is computed.
"""

from collections import deque
from collections.abc import Collection, Sequence

from kvell.elastic.logical_buffer import CpuBuffer
from kvell.engine.request import Request
from kvell.engine.swapping import Swapping
from kvell.memory import MemoryCore, pool_bytes_for
from kvell.vocabulary import RequestId

ROOM_TOKENS = 64
"""Who comes back finds room for so many tokens of everybody: else it would soon leave again."""


class Parking:
    """Who is parked, and who may be.

    :param sizes: the buffer's logical size, in its large pages.
    """

    def __init__(
        self, core: MemoryCore, swapping: Swapping, sizes: CpuBuffer, chunk_tokens: int
    ) -> None:
        self.parked: deque[Request] = deque()
        self.sizes = sizes
        self.count = 0
        self._core, self._swapping, self._chunk_tokens = core, swapping, chunk_tokens
        self._keys: dict[RequestId, int] = {}

    def give_way(
        self, request: Request, running: Sequence[Request], admitted: Collection[RequestId]
    ) -> list[Request]:
        """Requests that may be parked so that this one's prompt fits, the youngest first.

        None unless they are enough, and the buffer may hold them.
        """
        layout = self._core.layout
        if not self.sizes.free_chunks:
            return []
        seen = (
            layout if len({g.model for g in layout.groups}) == 1 else layout.seen_by(request.model)
        )
        need_bytes = pool_bytes_for(seen, request.num_tokens, self._chunk_tokens)
        need_bytes -= self._core.totals().empty_large * layout.large_page_bytes
        chosen, larges = list[Request](), 0
        for other in reversed(running):
            if not other.is_decoding or other.request_id in admitted:
                continue
            size_bytes = self._swapping.size_bytes(other)
            larges += -(-size_bytes // layout.large_page_bytes)
            if not size_bytes or larges > self.sizes.free_chunks:
                return []
            chosen.append(other)
            need_bytes -= size_bytes
            if need_bytes <= 0:
                return chosen if self._swapping.has_room(chosen) else []
        return []

    def park(self, request: Request, size_bytes: int) -> None:
        """The request's pages are in the buffer, so many bytes."""
        self.count += 1
        larges = -(-size_bytes // self._core.layout.large_page_bytes)
        self.sizes.hold(self.count, larges)
        self._keys[request.request_id] = self.count
        self.parked.append(request)

    def leave(self, request: Request) -> None:
        """It runs again, or is over."""
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            self.sizes.release(key)
        if request in self.parked:
            self.parked.remove(request)

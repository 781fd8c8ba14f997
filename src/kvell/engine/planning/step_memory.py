"""Memory of a step, for KV and activations, which limits how much the step may compute.

The scheduler asks a :class:`StepMemory`: that of a pool of KV alone, with a separate reserve for
activations, or :class:`SharedMemory` for one pool of both, which grants a step's KV and activations
together or not at all (eLLM §4.4.1)::

    begin ─► decodes: inflate for their growth ─► prefill chunks: the largest for which KV and
             activations both fit ─► grant: one slot for the activations of the whole step

The slot is released when the next step is planned.  That step runs later, so what it puts into the
slot's chunks is written when no kernel touches the slot any more; a position that lost its chunk is
unmapped only when the step's result is committed.  If the device refuses memory, that is no error:
the step computes less, or nothing.
"""

from collections import Counter
from collections.abc import Sequence

from typing_extensions import override

from kvell.elastic.arena import ActivationNeed, RememberedNeed, threshold_chunks
from kvell.elastic.memory import AHEAD_BYTES, ElasticMemory, Slot
from kvell.engine.requests.plan import StepSlot
from kvell.memory import GroupKind, MemoryCore
from kvell.prefix.groups.capacity import largest
from kvell.vocabulary import StepNumber

CLOSENESS = 64
"""The search for the largest prefill chunk that fits stops within one part in 64 of it."""


class StepMemory:
    """The memory of one step; ``tokens`` and ``rows`` (of logits) are those planned so far.

    This one is of a pool of KV alone: activations have their own reserve.

    :ivar slot: activations of the step granted last; None if they have a reserve.
    """

    def __init__(self, core: MemoryCore) -> None:
        self.rungs: dict[str, int] = {}
        self.slot: StepSlot | None = None
        self._core = core

    def begin(self, step: StepNumber, completed_step: int) -> None:
        """Begin to plan a step, which runs after all earlier ones.

        :param completed_step: the last step whose result is committed.
        """

    def before_decodes(self, lengths: Sequence[int]) -> bool:
        """Prepare to grow requests of these lengths by their newest token.

        Return whether their activations fit.
        """
        return True

    def give(self, tokens: int, rows: int) -> bool:
        """Give more pages to KV, which ran out of them; return whether it got any."""
        return False

    def largest(self, handle: int, computed: int, wanted: int, tokens: int, rows: int) -> int:
        """Return up to which token, at most ``wanted``, a request may be computed."""
        return self._core.largest(handle, wanted)

    def affordable(self, count: int, tokens: int, rows: int) -> int:
        """Return how many of ``count`` tokens of a request have room for their activations, if its
        pages need none."""
        return count

    def before_admission(self, chunk_tokens: int, tokens: int, rows: int) -> None:
        """Prepare to admit a request whose first chunk has ``chunk_tokens``, if it fits."""

    def most_draft_tokens(self, wanted: int, tokens: int, rows: int) -> int:
        """Return how many of ``wanted`` draft tokens have activations that nothing else wants."""
        return wanted

    def grant_activations(self, step: StepNumber, tokens: int, rows: int) -> bool:
        """Give the planned step its activations; return False if the device refuses them."""
        return True

    @property
    def is_complete(self) -> bool:
        """Whether no further chunk of the pool will get memory."""
        return True

    def warm(self, count: int) -> None:
        """Record that the next ``count`` chunks of the pool have memory; 0: no more will."""

    def figures(self) -> dict[str, int]:
        """Return chunks by owner and state, and counters so far; empty if nothing is shared."""
        return {}


class SharedMemory(StepMemory):
    """The :class:`StepMemory` of one pool for KV and activations, over a balloon.

    :param core: the scheduler's memory core; the balloon withholds its large pages.
    """

    def __init__(self, core: MemoryCore, memory: ElasticMemory, model: ActivationNeed) -> None:
        super().__init__(core)
        self.rungs = dict.fromkeys(
            ("inflate", "deflate", "shrink_for_activations", "refused_by_device"), 0
        )
        self.memory = memory
        self.most_activation_chunks = 0
        self._has_ended = False
        self._layout = core.layout
        self.need = RememberedNeed(model)
        self._slot: Slot | None = None
        self._growth_large = self._decodes = 0
        self._groups_by_page = Counter(
            group.page_tokens for group in core.layout.groups if group.kind is not GroupKind.STATE
        )
        self._step = StepNumber(0)

    @override
    def begin(self, step: StepNumber, completed_step: int) -> None:
        if self._slot is not None:
            self.memory.release(self._slot, self._step)
            self._slot = self.slot = None
        self.memory.tend(completed_step)
        self._step = step
        self._growth_large = self._decodes = 0

    @override
    def before_decodes(self, lengths: Sequence[int]) -> bool:
        self._decodes = len(lengths)
        self._growth_large = sum(
            groups * sum(length % page_tokens == 1 % page_tokens for length in lengths)
            for page_tokens, groups in self._groups_by_page.items()
        )
        chunks = self._chunks(len(lengths), len(lengths))
        if self._growth_large:
            self._inflate_for(self._growth_large, chunks)
        return self._ensure(chunks) >= chunks

    @override
    def give(self, tokens: int, rows: int) -> bool:
        return self._inflate(self._layout.num_large_pages, self._chunks(tokens, rows)) > 0

    @override
    def largest(self, handle: int, computed: int, wanted: int, tokens: int, rows: int) -> int:
        count = self.affordable(wanted - computed, tokens, rows)
        if count <= 0:
            return computed
        self._inflate_for(self._large_pages(count), self._kept(tokens + count, rows))
        until = self._core.largest(handle, computed + count)
        if until < computed + count:
            until = self._balanced(handle, computed, (until - computed, count), tokens, rows)
        return until

    @override
    def before_admission(self, chunk_tokens: int, tokens: int, rows: int) -> None:
        kept = self._kept(tokens + chunk_tokens, rows)
        self._ensure(kept)
        self._inflate(self._layout.num_large_pages, kept)

    @override
    def most_draft_tokens(self, wanted: int, tokens: int, rows: int) -> int:
        """Return how many draft tokens fit beside the other work, without a page of KV for them."""
        least = self._chunks(tokens, rows)
        free = max(least, self.memory.balloon.idle_chunks)
        while wanted > 0 and self._chunks(tokens + wanted, rows + wanted) > free:
            wanted //= 2
        return wanted

    @override
    def grant_activations(self, step: StepNumber, tokens: int, rows: int) -> bool:
        chunks = self._chunks(tokens, rows)
        if not chunks:
            return True
        self._ensure(chunks)
        self._slot = self.memory.grant(self.need.need_bytes(tokens, rows), step)
        if self._slot is None:
            self.rungs["refused_by_device"] += 1
            return False
        self.slot = StepSlot(self._slot.start, self._slot.num_chunks)
        self.most_activation_chunks = max(self.most_activation_chunks, chunks)
        return True

    @property
    @override
    def is_complete(self) -> bool:
        return self._has_ended or not len(self.memory.balloon.uncommitted_chunks)

    @override
    def warm(self, count: int) -> None:
        self._has_ended |= not count
        self.memory.warm(count)

    @override
    def figures(self) -> dict[str, int]:
        return self.memory.figures() | {"largest_step_chunks": self.most_activation_chunks}

    # ------------------------------------------------------------------- chunk sizes

    @override
    def affordable(self, count: int, tokens: int, rows: int) -> int:
        idle = self._ensure(self._kept(tokens + count, rows))
        if idle >= self._kept(tokens + count, rows):
            return count
        self.rungs["shrink_for_activations"] += 1
        return largest(max(0, count - 1), lambda n: self._kept(tokens + n, rows) <= idle)

    def _balanced(
        self, handle: int, computed: int, bounds: tuple[int, int], tokens: int, rows: int
    ) -> int:
        """Return up to which token KV and activations both fit, by bisection.

        Fewer tokens need fewer activations, which leaves more chunks for KV.

        :param bounds: a count that fits, and one that does not.
        """
        low, high = bounds
        while high - low > max(1, high // CLOSENESS):
            middle = (low + high) // 2
            if self._share(tokens + middle, rows) and (
                self._core.largest(handle, computed + middle) == computed + middle
            ):
                low = middle
            else:
                high = middle
        self._share(tokens + low, rows)
        # Chunks have changed owners and may now be under other large pages: ask again.
        return self._core.largest(handle, computed + low)

    def _share(self, tokens: int, rows: int) -> bool:
        kept = self._kept(tokens, rows)
        self._inflate(self._layout.num_large_pages, kept)
        return self._ensure(kept) >= kept

    def _chunks(self, tokens: int, rows: int) -> int:
        """Return the chunks of a step's activations; 0 for one that computes nothing."""
        need_bytes = self.need.need_bytes(tokens, rows) if tokens else 0
        return -(-need_bytes // self.memory.device.chunk_bytes)

    def _kept(self, tokens: int, rows: int) -> int:
        """Return the chunks for ``tokens`` and one more request, plus θ if any request decodes."""
        chunks = self._chunks(tokens, rows + 1)
        if not self._decodes:
            return chunks
        total = self.memory.balloon.tiling.num_chunks
        growth_bytes = self._growth_large * self._layout.large_page_bytes
        growth = -(-growth_bytes // self.memory.device.chunk_bytes)
        return chunks + threshold_chunks(growth, total)

    def _large_pages(self, tokens: int) -> int:
        """Return the most large pages that ``tokens`` more of one request may fill."""
        return sum(
            -(-tokens // (group.page_tokens * group.pages_per_large)) + 1
            for group in self._layout.groups
        )

    # ----------------------------------------------------------------------- moving

    def _inflate_for(self, num_large: int, keep_chunks: int) -> None:
        """Inflate to ``num_large`` empty large pages, or by 50 MB if that is more (eLLM §5.1).

        The next steps then need not inflate.
        """
        short = num_large - self._core.empty_large_pages()
        if short > 0:
            ahead = AHEAD_BYTES // self._layout.large_page_bytes
            self._inflate(max(short, ahead), keep_chunks)

    def _inflate(self, num_large: int, keep_chunks: int) -> int:
        chunks_a_large = self._layout.large_page_bytes // self.memory.device.chunk_bytes
        if self.memory.balloon.idle_chunks - keep_chunks < max(1, chunks_a_large):
            return 0
        got = self.memory.inflate(num_large, keep_chunks * self.memory.device.chunk_bytes)
        self.rungs["inflate"] += got > 0
        return got

    def _ensure(self, num_chunks: int) -> int:
        before = self.memory.balloon.idle_chunks
        if before >= num_chunks:
            return before
        idle = self.memory.ensure(num_chunks)
        self.rungs["deflate"] += idle > before
        return idle

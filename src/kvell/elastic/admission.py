"""Algorithm 1 of eLLM (§4.4.1): which work gets memory in this step, as pure functions.

Two interpretations (they are the design's): P_T is the memory that is free *or reclaimable now*,
and steps are mixed: decodes first, each with the fetch of its pages in the CPU buffer, then prefill
chunks until one does not fit. KV and activations of all work are granted together, so no work holds
one while it waits for the other. θ reserves the next growth of the decodes.

All amounts are in chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvell.elastic.arena import ActivationNeed

SAFETY = 100
"""θ reserves one chunk in this many, in addition to the next growth of the decodes."""


def threshold_chunks(decode_growth_chunks: int, total_chunks: int) -> int:
    """Return θ: next step's predicted growth of the decodes, and 1 % of all chunks."""
    return decode_growth_chunks + -(-total_chunks // SAFETY)


@dataclass(frozen=True)
class Decode:
    """A request with one token to compute.

    :param kv_chunks: growth of its KV.
    :param fetch_chunks: chunks of its KV in the CPU buffer that are copied back first.
    """

    request: int
    kv_chunks: int = 0
    fetch_chunks: int = 0


@dataclass(frozen=True)
class Prefill:
    """A request with prompt left to compute.

    :param tokens: left, as many as the step's budget allows.
    :param kv_chunks: chunks for a number of these tokens: KV and checkpoints; grows with its
        argument.
    :param staging_chunks: chunks that stay on the device while KV is streamed out: a layer's.
    """

    request: int
    tokens: int
    kv_chunks: Callable[[int], int]
    staging_chunks: int = 0


@dataclass(frozen=True)
class Supply:
    """The memory that can be granted.

    :param kv_chunks: free on the KV side (P_kv).
    :param activation_chunks: idle on the activation side (P_act).
    :param reclaimable_chunks: further chunks of the KV side if cached pages are evicted.
    :param buffer_chunks: of the CPU buffer that may still be used (P_B).
    :param threshold_chunks: θ.
    """

    kv_chunks: int
    activation_chunks: int
    reclaimable_chunks: int = 0
    buffer_chunks: int = 0
    threshold_chunks: int = 0

    @property
    def total_chunks(self) -> int:
        """P_T: the chunks that are free or reclaimable now."""
        return self.kv_chunks + self.activation_chunks + self.reclaimable_chunks


@dataclass(frozen=True)
class Chunk:
    """A prefill chunk of a step: its tokens, with KV on the device or streamed out."""

    request: int
    tokens: int
    offloaded: bool = False


@dataclass(frozen=True)
class Admission:
    """The memory that a step takes and moves.

    :param inflation_chunks: I of the paper: from activations to KV if positive, back if not.
    """

    decodes: tuple[int, ...] = ()
    prefills: tuple[Chunk, ...] = ()
    kv_chunks: int = 0
    activation_chunks: int = 0
    offloaded_chunks: int = 0
    fetched_chunks: int = 0
    inflation_chunks: int = 0


@dataclass(frozen=True)
class StepMemory:
    """The activations that a step needs, by its tokens and rows of logits."""

    model: ActivationNeed
    chunk_bytes: int

    def chunks(self, tokens: int, rows: int) -> int:
        """Return the chunks of a step; 0 for one that computes nothing."""
        if not tokens:
            return 0
        return -(-self.model.need_bytes(tokens, rows) // self.chunk_bytes)


def admit(
    decodes: Sequence[Decode],
    prefills: Sequence[Prefill],
    supply: Supply,
    memory: StepMemory,
    min_tokens: int = 1,
) -> Admission:
    """Admit decodes first, then prefill chunks, until one does not fit.

    :param min_tokens: a prefill chunk of fewer tokens is not worth a step, unless it is the rest.
    """
    filling = _Filling(supply, memory)
    for decode in decodes:
        if not filling.add_decode(decode):
            return filling.admission()
    for prefill in prefills:
        if not filling.add_prefill(prefill, min_tokens):
            break
    return filling.admission()


class _Filling:
    """The work and memory granted so far; M_kv and M_act of the paper."""

    def __init__(self, supply: Supply, memory: StepMemory) -> None:
        self._supply, self._memory = supply, memory
        self._kv = self._tokens = self._rows = self._offloaded = self._fetched = 0
        self._decodes: list[int] = []
        self._prefills: list[Chunk] = []

    def add_decode(self, decode: Decode) -> bool:
        """Admit a decode together with its fetch, or not at all."""
        kv = decode.kv_chunks + decode.fetch_chunks
        if not self._fits(1, kv):
            return False
        self._take(1, kv)
        self._fetched += decode.fetch_chunks
        self._decodes.append(decode.request)
        return True

    def add_prefill(self, prefill: Prefill, min_tokens: int) -> bool:
        """Admit a whole prefill, else stream it to a free buffer, else admit its largest part."""
        tokens = prefill.tokens
        kv = prefill.kv_chunks(prefill.tokens)
        if self._fits(tokens, kv):
            return self._chunk(prefill, tokens, kv)
        room = self._supply.buffer_chunks - self._offloaded
        if kv <= room and self._fits(tokens, prefill.staging_chunks):
            self._take(tokens, prefill.staging_chunks)
            self._offloaded += kv
            self._prefills.append(Chunk(prefill.request, tokens, offloaded=True))
            return True
        tokens = self._largest(prefill)
        if tokens < min(min_tokens, prefill.tokens) or not tokens:
            return False
        self._chunk(prefill, tokens, prefill.kv_chunks(tokens))
        return False  # later work waits: memory is exhausted

    def admission(self) -> Admission:
        """Return the grants and the chunks that change owner for them (the paper's lines 23-27)."""
        need_kv = self._kv
        need_act = self._memory.chunks(self._tokens, self._rows)
        spare_act = self._supply.activation_chunks - need_act
        inflation = min(0, spare_act)
        if need_kv > self._supply.kv_chunks and spare_act > 0:
            inflation = min(
                need_kv - self._supply.kv_chunks, spare_act
            )  # before anything is evicted
        return Admission(
            tuple(self._decodes),
            tuple(self._prefills),
            need_kv,
            need_act,
            self._offloaded,
            self._fetched,
            inflation,
        )

    def _largest(self, prefill: Prefill) -> int:
        low = 0
        high = prefill.tokens - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(middle, prefill.kv_chunks(middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def _chunk(self, prefill: Prefill, tokens: int, kv: int) -> bool:
        self._take(tokens, kv)
        self._prefills.append(Chunk(prefill.request, tokens))
        return True

    def _fits(self, tokens: int, kv: int) -> bool:
        activations = self._memory.chunks(self._tokens + tokens, self._rows + 1)
        left = self._supply.total_chunks - self._kv - kv - activations
        return left >= self._supply.threshold_chunks

    def _take(self, tokens: int, kv: int) -> None:
        self._tokens += tokens
        self._rows += 1
        self._kv += kv

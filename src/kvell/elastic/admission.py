"""Algorithm 1 of eLLM (§4.4.1): which work gets memory in this step, as pure functions.

Two readings (they are the design's): P_T is what is free *or reclaimable now*, and steps are
mixed: decodes first, each with the fetch of what lies in the CPU buffer, then prefill chunks until
one does not fit.  KV and activations of all work are granted together, so nobody holds
one while waiting for the other.  θ keeps what decodes will need next.

Everything is counted in chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvell.elastic.arena import ActivationNeed

SAFETY = 100
"""θ keeps one chunk in so many, beside what decodes are about to need."""


def threshold_chunks(decode_growth_chunks: int, total_chunks: int) -> int:
    """θ: next step's predicted growth of the decodes, and 1 % of all."""
    return decode_growth_chunks + -(-total_chunks // SAFETY)


@dataclass(frozen=True)
class Decode:
    """A request with one token to compute.

    :param kv_chunks: that its KV grows by.
    :param fetch_chunks: of its KV that lie in the CPU buffer and come back first.
    """

    request: int
    kv_chunks: int = 0
    fetch_chunks: int = 0


@dataclass(frozen=True)
class Prefill:
    """A request with prompt left to compute.

    :param tokens: left, as many as the step's budget allows.
    :param kv_chunks: what so many of them need: KV and checkpoints; grows with its argument.
    :param staging_chunks: what stays on the device while KV is streamed out: a layer's.
    """

    request: int
    tokens: int
    kv_chunks: Callable[[int], int]
    staging_chunks: int = 0


@dataclass(frozen=True)
class Supply:
    """What there is to give.

    :param kv_chunks: free on the KV side (P_kv).
    :param activation_chunks: idle on the other (P_act).
    :param reclaimable_chunks: of the KV side, more if what is only cached goes.
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
        """P_T: free or reclaimable now."""
        return self.kv_chunks + self.activation_chunks + self.reclaimable_chunks


@dataclass(frozen=True)
class Chunk:
    """A prefill chunk of a step: so many tokens, with KV on the device or streamed out."""

    request: int
    tokens: int
    offloaded: bool = False


@dataclass(frozen=True)
class Admission:
    """What a step does with memory.

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
    """What activations a step needs, by its tokens and rows of logits."""

    model: ActivationNeed
    chunk_bytes: int

    def chunks(self, tokens: int, rows: int) -> int:
        """Chunks of a step; 0 for one that computes nothing."""
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
    """Decodes first, then prefill chunks, until one does not fit.

    :param min_tokens: a prefill chunk of fewer tokens is not worth a step, unless it is all.
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
    """What has been granted so far; M_kv and M_act of the paper."""

    def __init__(self, supply: Supply, memory: StepMemory) -> None:
        self._supply, self._memory = supply, memory
        self._kv = self._tokens = self._rows = self._offloaded = self._fetched = 0
        self._decodes: list[int] = []
        self._prefills: list[Chunk] = []

    def add_decode(self, decode: Decode) -> bool:
        """With its fetch, or not at all."""
        kv = decode.kv_chunks + decode.fetch_chunks
        if not self._fits(1, kv):
            return False
        self._take(1, kv)
        self._fetched += decode.fetch_chunks
        self._decodes.append(decode.request)
        return True

    def add_prefill(self, prefill: Prefill, min_tokens: int) -> bool:
        """The whole of it; else, where the buffer has room, streamed out; else the largest part."""
        tokens, kv = prefill.tokens, prefill.kv_chunks(prefill.tokens)
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
        return False  # what comes behind waits: memory is at its end

    def admission(self) -> Admission:
        """What was granted, and which chunks change owner for it (the paper's lines 23 to 27)."""
        need_kv, need_act = self._kv, self._memory.chunks(self._tokens, self._rows)
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
        low, high = 0, prefill.tokens - 1
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

"""The throughput of two instances if one lends memory to the other.

::

    T(β, S)  = W(β)/f(β) + S/g                      a step of β requests that read S tokens   (5)
    T_dbt    = T(β', S) - K/g + K/r                 K of them are remote                      (6)
    T_cdt    = T(β, S) + K/g                        K more are read in its memory             (6)
    TPS      = Σ β/T                                over both                                 (7)

Seconds are of all layers of a step, so they include the paper's n.  How remote tokens are read
depends on the creditor.  *In place*, the debtor itself computes over the creditor's pages, at the
rate r.  A creditor that is *asked* computes while the debtor computes its own attention: the
debtor waits for a round trip for each layer, for queries and records, and for the creditor's reads,
as far as these take longer than its own.  If prices say that results come in time, r is infinite,
as in the paper's equation 6.

Prices are fitted by a calibration (:func:`kvell.cost.prices.prices_of`).
Source: Infinite-LLM §5.3.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvell.cluster.steering.placements import Reading
from kvell.cost.prices import BATCHES, ExecCosts

Numbers = npt.NDArray[np.float64]
SLOWDOWN = 2.0
"""A batch is small while its step takes at most this many times that of a single request: then the
weights are read for few requests, and a further one costs little."""


@dataclass(frozen=True, slots=True)
class ThroughputInputs:
    """The inputs of an instance's throughput.

    :param batch: β, number of running requests.
    :param held_tokens: S, tokens that a step of them reads, local or remote.
    :param running_bytes: mean local memory of a running request.
    :param waiting: number of requests that wait for memory here, the head of the line included;
        the others have ``waiting_tokens`` and take ``waiting_bytes`` each, in the mean.
    :param head_tokens: tokens of the head of the line; it is admitted before all others.
    :param spare_bytes: free memory beyond what the instance needs to continue; below 0, the amount
        that is missing, so that requests will be preempted.
    :param away_tokens: of the tokens read, those that are read in place at other instances.
    :param lent_tokens: tokens of other instances that are stored here.
    :param asked_tokens: of the tokens read, those that creditors are asked about.
    :param asking: number of requests with such tokens.
    """

    batch: int
    held_tokens: int
    running_bytes: float
    waiting: int = 0
    head_tokens: float = 0.0
    head_bytes: float = 0.0
    waiting_tokens: float = 0.0
    waiting_bytes: float = 0.0
    spare_bytes: int = 0
    away_tokens: int = 0
    lent_tokens: int = 0
    asked_tokens: int = 0
    asking: int = 0

    @property
    def needs_memory(self) -> bool:
        return self.waiting > 0 or self.spare_bytes < 0

    @property
    def missing_bytes(self) -> float:
        """The least memory with which one more request runs; infinite if none needs memory."""
        if self.spare_bytes < 0:
            running_bytes = max(1.0, self.running_bytes)
            give_way = min(math.ceil(-self.spare_bytes / running_bytes), self.batch)
            return -self.spare_bytes - max(0, give_way - 1) * running_bytes
        beyond_bytes = self.spare_bytes - self.head_bytes
        if not self.waiting:
            return math.inf
        if beyond_bytes < 0:
            return -beyond_bytes
        waiting_bytes = max(1.0, self.waiting_bytes)
        admitted = 1 + math.floor(beyond_bytes / waiting_bytes)
        return math.inf if admitted >= self.waiting else admitted * waiting_bytes - beyond_bytes

    def borrowing(self, tokens: int, size_bytes: int, reading: Reading) -> "ThroughputInputs":
        """Return the inputs after ``tokens`` have moved to a creditor, which frees their memory."""
        spare_bytes = self.spare_bytes + size_bytes
        if reading == "in place":
            return replace(self, spare_bytes=spare_bytes, away_tokens=self.away_tokens + tokens)
        asked_tokens = self.asked_tokens + tokens
        asking = max(1, self.asking)
        return replace(self, spare_bytes=spare_bytes, asked_tokens=asked_tokens, asking=asking)

    def lending(self, tokens: int, size_bytes: int) -> "ThroughputInputs":
        """Return the inputs after ``tokens`` of a debtor have been stored here."""
        spare_bytes = self.spare_bytes - size_bytes
        return replace(self, spare_bytes=spare_bytes, lent_tokens=self.lent_tokens + tokens)


class PerformanceModel:
    """Equations 5 to 7 of one instance, for any number of loans together.

    :ivar small_batch: β^thres of Algorithm 1: the largest batch that is small.
    """

    def __init__(self, costs: ExecCosts) -> None:
        seconds = [costs.batch_seconds(batch) for batch in BATCHES]
        slope = (seconds[-1] - seconds[-2]) / (BATCHES[-1] - BATCHES[-2])
        far = 1 << 24
        self._batches = np.array([*BATCHES, far], np.float64)
        self._seconds = np.array([*seconds, seconds[-1] + slope * (far - BATCHES[-1])], np.float64)
        self._costs = costs
        small = [batch for batch in BATCHES if costs.batch_seconds(batch) <= SLOWDOWN * seconds[0]]
        self.small_batch = max(small)

    def batch_with(self, load: ThroughputInputs, freed_bytes: Numbers) -> Numbers:
        """Return β' [k] of an instance with ``freed_bytes`` more; it never falls as they grow.

        Waiting requests are admitted as far as there is memory beyond what is needed: the head of
        the line by its own size, then others by their mean.  If some of that memory is missing,
        requests are preempted.
        """
        spare = load.spare_bytes + freed_bytes
        beyond = spare - load.head_bytes
        let_in = np.where(beyond >= 0, 1 + np.floor(beyond / max(1.0, load.waiting_bytes)), 0)
        give_way = np.ceil(np.maximum(0.0, -spare) / max(1.0, load.running_bytes))
        let_in = np.minimum(let_in, load.waiting)
        batch: Numbers = load.batch + let_in - np.minimum(give_way, load.batch)
        return batch

    def together(
        self,
        load: ThroughputInputs,
        tokens: Numbers,
        size_bytes: Numbers,
        creditor: Numbers,
        reading: Reading = "in place",
    ) -> Numbers:
        """Return the throughput [k] of a debtor and a creditor in tokens a second (equation 7);
        below 0 if remote reads take longer than the rest of the debtor's step (:meth:`borrowing`).

        :param creditor: throughput [k] of the creditor, by its own model.
        """
        throughput, covered = self.borrowing(load, tokens, size_bytes, reading)
        return np.where(covered, throughput + creditor, -1.0)

    def creditor(self, load: ThroughputInputs, tokens: Numbers, size_bytes: Numbers) -> Numbers:
        """Return the throughput [k] of an instance that lends memory for ``tokens`` more tokens.

        Its batch falls once it lends more than its spare memory (equation 6, §5.2.2).
        """
        batch = self.batch_with(load, -size_bytes)
        away = load.away_tokens
        natn, attended = self._local(load, batch, away + load.asked_tokens)
        read = (load.lent_tokens + tokens) * self._costs.held_token_seconds
        throughput: Numbers = batch / (natn + attended + read)
        return throughput

    def borrowing(
        self,
        load: ThroughputInputs,
        tokens: Numbers,
        size_bytes: Numbers,
        reading: Reading = "in place",
    ) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return the throughput [k] of an instance that moves ``tokens`` more tokens away and so
        frees ``size_bytes`` (equation 6), and whether remote reads take no longer than the rest of
        its step [k] (§5.2.1, figure 6)."""
        batch = self.batch_with(load, size_bytes)
        is_asked = reading == "asked"
        away = load.away_tokens + (0 if is_asked else tokens)
        asked_tokens = load.asked_tokens + (tokens if is_asked else 0)
        natn, attended = self._local(load, batch, away + asked_tokens)
        in_place = away * self._costs.away_token_seconds
        wait = self._waits(asked_tokens, load.asking)
        throughput: Numbers = batch / (natn + in_place + np.maximum(attended, wait))
        return throughput, in_place + wait <= natn + attended

    def _waits(self, asked_tokens: Numbers | int, asking: int) -> Numbers:
        """Return the seconds until creditors have answered for these tokens in one step."""
        costs = self._costs
        seconds = costs.asked_step_seconds + max(1, asking) * costs.asked_row_seconds
        return np.where(
            np.asarray(asked_tokens) > 0, seconds + asked_tokens * costs.held_token_seconds, 0.0
        )

    def _local(
        self, load: ThroughputInputs, batch: Numbers, remote: Numbers | int
    ) -> tuple[Numbers, Numbers]:
        """Return the seconds of a step (equation 5) without its remote tokens: those without
        attention, and those of attention."""
        mean = load.held_tokens / max(1, load.batch)
        held = np.minimum(batch, load.batch) * mean
        if load.waiting:
            let_in = batch - load.batch
            held = held + np.clip(let_in, 0.0, 1.0) * load.head_tokens
            held = held + np.maximum(0.0, let_in - 1) * load.waiting_tokens
        natn: Numbers = np.interp(batch, self._batches, self._seconds)
        return natn, np.maximum(0.0, held - remote) * self._costs.held_token_seconds

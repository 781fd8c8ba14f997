"""The throughput of two instances if one lends memory to the other.

::

    T(β, S)  = W(β)/f(β) + S/g                      a step of β requests that read S tokens   (5)
    T_dbt    = T(β', S) - K/g + K/r                 K of them are remote                      (6)
    T_cdt    = T(β, S) + K/g                        K more are read in its memory             (6)
    TPS      = Σ β/T                                over both                                 (7)

Seconds are of all layers of a step, so they include the paper's n.  r is the rate of reading remote
tokens: here a debtor itself computes over the creditor's pages, in place.  If a creditor computes
for it and the results come in time, r is infinite, as in the paper's equation 6.

Prices are fitted by a calibration (:func:`kvell.cost.prices.prices_of`).
Source: Infinite-LLM §5.3.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    :param waiting: number of requests that wait for memory here, of ``waiting_tokens`` and
        ``waiting_bytes`` each, in the mean.
    :param spare_bytes: free memory beyond what the instance needs to continue; below 0, the amount
        that is missing, so that requests will be preempted.
    :param away_tokens: of the tokens read, the remote ones.
    :param lent_tokens: tokens of other instances that are stored here.
    """

    batch: int
    held_tokens: int
    running_bytes: float
    waiting: int = 0
    waiting_tokens: float = 0.0
    waiting_bytes: float = 0.0
    spare_bytes: int = 0
    away_tokens: int = 0
    lent_tokens: int = 0


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
        self._held, self._away = costs.held_token_seconds, costs.away_token_seconds
        small = [batch for batch in BATCHES if costs.batch_seconds(batch) <= SLOWDOWN * seconds[0]]
        self.small_batch = max(small)

    def batch_with(self, load: ThroughputInputs, freed_bytes: Numbers) -> Numbers:
        """Return β' [k] of an instance with ``freed_bytes`` more; it never falls as they grow.

        Waiting requests are admitted as far as there is memory beyond what is needed.  If some of
        that is missing, requests are preempted.
        """
        spare = load.spare_bytes + freed_bytes
        let_in = np.floor(np.maximum(0.0, spare) / max(1.0, load.waiting_bytes))
        give_way = np.ceil(np.maximum(0.0, -spare) / max(1.0, load.running_bytes))
        let_in = np.minimum(let_in, load.waiting)
        batch: Numbers = load.batch + let_in - np.minimum(give_way, load.batch)
        return batch

    def together(
        self, load: ThroughputInputs, tokens: Numbers, size_bytes: Numbers, creditor: Numbers
    ) -> Numbers:
        """Return the throughput [k] of a debtor and a creditor in tokens a second (equation 7);
        below 0 if remote reads take longer than the rest of the debtor's step (:meth:`covers`).

        :param creditor: throughput [k] of the creditor, by its own model.
        """
        throughput, covered = self._borrowing(load, tokens, size_bytes)
        return np.where(covered, throughput + creditor, -1.0)

    def debtor(self, load: ThroughputInputs, tokens: Numbers, size_bytes: Numbers) -> Numbers:
        """Return the throughput [k] of an instance that moves ``tokens`` more tokens away and so
        frees ``size_bytes`` (equation 6)."""
        return self._borrowing(load, tokens, size_bytes)[0]

    def creditor(self, load: ThroughputInputs, tokens: Numbers, size_bytes: Numbers) -> Numbers:
        """Return the throughput [k] of an instance that lends memory for ``tokens`` more tokens.

        Its batch falls once it lends more than its spare memory (equation 6, §5.2.2).
        """
        batch = self.batch_with(load, -size_bytes)
        read = (load.lent_tokens + tokens) * self._held
        throughput: Numbers = batch / (self._local(load, batch, load.away_tokens) + read)
        return throughput

    def covers(
        self, load: ThroughputInputs, tokens: Numbers, size_bytes: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Return whether remote reads take no longer than the rest of a debtor's step [k] (§5.2.1,
        figure 6)."""
        return self._borrowing(load, tokens, size_bytes)[1]

    def _borrowing(
        self, load: ThroughputInputs, tokens: Numbers, size_bytes: Numbers
    ) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return :meth:`debtor` and :meth:`covers` together, since planning needs both."""
        batch = self.batch_with(load, size_bytes)
        away = load.away_tokens + tokens
        local = self._local(load, batch, away)
        elsewhere = away * self._away
        throughput: Numbers = batch / (local + elsewhere)
        return throughput, elsewhere <= local

    def _local(self, load: ThroughputInputs, batch: Numbers, away: Numbers | int) -> Numbers:
        """Return the seconds of a step (equation 5) without its remote tokens."""
        mean = load.held_tokens / max(1, load.batch)
        held = np.minimum(batch, load.batch) * mean
        if load.waiting:
            held = held + np.maximum(0.0, batch - load.batch) * load.waiting_tokens
        natn: Numbers = np.interp(batch, self._batches, self._seconds)
        return natn + np.maximum(0.0, held - away) * self._held

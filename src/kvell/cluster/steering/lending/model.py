"""How many tokens a second instances make together if one lends another memory.

::

    T(β, S)  = W(β)/f(β) + S/g                      a step of β requests that read S tokens   (5)
    T_dbt    = T(β', S) - K/g + K/r                 K of them lie elsewhere                   (6)
    T_cdt    = T(β, S) + K/g                        K more are read in its memory             (6)
    TPS      = Σ β/T                                over both                                 (7)

Seconds are of all layers of a step, so the paper's n is in them.  r is what a debtor reads
elsewhere: here a debtor computes over the creditor's pages itself, in place.  Where a creditor
computes for it, and the results come in time, r is infinite: that is the paper's equation 6.

Prices are those that a calibration fits (:func:`kvell.cluster.routing.costs.fitted`).
Source: Infinite-LLM §5.3.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.cluster.routing.costs import BATCHES, ExecCosts

Numbers = npt.NDArray[np.float64]
SLOWDOWN = 2.0
"""A batch is small while its step takes at most so many times that of a single request: then the
weights are read for few, and a further request costs little."""


@dataclass(frozen=True, slots=True)
class Load:
    """What decides an instance's throughput.

    :param batch: β, requests that run.
    :param held_tokens: S, tokens that a step of them reads, wherever they lie.
    :param running_bytes: memory of one of them here, in the mean.
    :param waiting: requests that wait for memory here, of ``waiting_tokens`` and ``waiting_bytes``
        each, in the mean.
    :param spare_bytes: free memory beyond what the instance needs to go on; below 0: so much is
        missing, and requests will give way.
    :param away_tokens: of the tokens read, those that lie elsewhere.
    :param lent_tokens: tokens of others that lie here.
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
    """Equations 5 to 7, for any number of loans at once.

    :param costs: of the instances' model; all instances are taken to be alike.
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

    def batch_with(self, load: Load, freed_bytes: Numbers) -> Numbers:
        """β' once an instance has so much more memory, or less [k]; never falls with it.

        Those that wait are let in as far as there is room beyond what is needed.  Where some of
        that is missing, requests give way.
        """
        spare = load.spare_bytes + freed_bytes
        let_in = np.floor(np.maximum(0.0, spare) / max(1.0, load.waiting_bytes))
        give_way = np.ceil(np.maximum(0.0, -spare) / max(1.0, load.running_bytes))
        let_in = np.minimum(let_in, load.waiting)
        batch: Numbers = load.batch + let_in - np.minimum(give_way, load.batch)
        return batch

    def together(self, borrows: Load, lends: Load, tokens: Numbers, size_bytes: Numbers) -> Numbers:
        """Tokens a second [k] of a debtor and a creditor (equation 7); below 0 where reading
        elsewhere takes longer than the rest of the debtor's step (:meth:`covers`)."""
        throughput, covered = self._borrowing(borrows, tokens, size_bytes)
        return np.where(covered, throughput + self.creditor(lends, tokens, size_bytes), -1.0)

    def debtor(self, load: Load, tokens: Numbers, size_bytes: Numbers) -> Numbers:
        """Tokens a second [k] of an instance if so many of its tokens lie elsewhere beside those
        that do, which frees so many bytes (equation 6)."""
        return self._borrowing(load, tokens, size_bytes)[0]

    def creditor(self, load: Load, tokens: Numbers, size_bytes: Numbers) -> Numbers:
        """Tokens a second [k] of an instance that lends memory for so many more tokens.

        Its batch falls once it lends more than it has to spare (equation 6, §5.2.2).
        """
        batch = self.batch_with(load, -size_bytes)
        read = (load.lent_tokens + tokens) * self._held
        throughput: Numbers = batch / (self._local(load, batch, load.away_tokens) + read)
        return throughput

    def covers(self, load: Load, tokens: Numbers, size_bytes: Numbers) -> npt.NDArray[np.bool_]:
        """Whether reading elsewhere takes no longer than the rest of a debtor's step [k] (§5.2.1,
        figure 6)."""
        return self._borrowing(load, tokens, size_bytes)[1]

    def _borrowing(
        self, load: Load, tokens: Numbers, size_bytes: Numbers
    ) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """:meth:`debtor` and :meth:`covers` at once, since planning asks for both."""
        batch = self.batch_with(load, size_bytes)
        away = load.away_tokens + tokens
        local, elsewhere = self._local(load, batch, away), away * self._away
        throughput: Numbers = batch / (local + elsewhere)
        return throughput, elsewhere <= local

    def _local(self, load: Load, batch: Numbers, away: Numbers | int) -> Numbers:
        """Seconds of a step (equation 5) without the tokens that lie elsewhere."""
        mean = load.held_tokens / max(1, load.batch)
        held = np.minimum(batch, load.batch) * mean
        if load.waiting:
            held = held + np.maximum(0.0, batch - load.batch) * load.waiting_tokens
        natn: Numbers = np.interp(batch, self._batches, self._seconds)
        return natn + np.maximum(0.0, held - away) * self._held

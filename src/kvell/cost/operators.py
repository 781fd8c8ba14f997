"""The three classes of operators of MemServe §5.3.2, and a step as their sum.

- *Compute-bound* (matrix multiplications): as many waves as it takes to give every tile of the
  output to a core, ``(η − 1)·T_fullwave + T_lastwave``.  A wave's seconds depend on the regime:
  few rows wait for the weights, many for the arithmetic, and libraries change kernels between.
  So the price of a wave depends on its position (:class:`Waves`): f(β) of Infinite-LLM's
  equation 5.
- *Memory-bound* (attention): for x new tokens after y cached ones, ``a·x²y + b·x² + c·x + d``
  in the paper, where y is cached ÷ new.  Pairs of query and key are x·(y·x) + x·(x + 1)/2 in a
  layer of full attention, so these four terms are a price for a pair, for a key read and for a
  request.  A count of pairs and keys instead of lengths holds for windows and for whole
  batches too (:class:`Attention`): g(S) of equation 5.
- *Constant* (norms, activations, launching them): a fixed share of a token's cost in its
  layers, and fixed seconds for a step, a request and a scan's round (:class:`Constants`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvell.cost.amounts import Amounts, ModelShape
from kvell.cost.parallel import ALONE, Parallel
from kvell.cost.work import Work


@dataclass(frozen=True)
class Waves:
    """A compute-bound operator over n rows.

    :param tile_rows: rows of a wave; the last wave costs as much as a full one.
    :param knots: rows at which the price changes, from 0 upwards.
    :param row_seconds: price of a row after each knot.
    """

    tile_rows: int
    knots: tuple[int, ...]
    row_seconds: tuple[float, ...]

    def seconds(self, rows: int) -> float:
        """Return the seconds for ``rows``; they never fall with rows."""
        amounts = spans(rows, self.tile_rows, self.knots)
        return sum(x * price for x, price in zip(amounts, self.row_seconds, strict=True))


def spans(rows: int, tile_rows: int, knots: Sequence[int]) -> list[int]:
    computed = -(-rows // tile_rows) * tile_rows
    ends = (*knots[1:], max(computed, knots[-1]))
    return [max(0, min(computed, end) - start) for start, end in zip(knots, ends, strict=True)]


@dataclass(frozen=True)
class Attention:
    """The memory-bound operator, over all layers.

    :param pair_seconds: for a query and a key.
    :param read_seconds: for a key and its value, once for all queries of a request.
    :param prompt_seconds: for a request that computes several tokens.
    """

    pair_seconds: float
    read_seconds: float
    prompt_seconds: float

    def seconds(self, amounts: Amounts) -> float:
        return (
            self.pair_seconds * amounts.pairs
            + self.read_seconds * amounts.read_tokens
            + self.prompt_seconds * amounts.prompts
        )


@dataclass(frozen=True)
class Constants:
    """The costs that no operator's size explains.

    :param round_seconds: for each round of a scan.
    :param share: part of a token's time in its layers for norms and activations: every device of a
        tensor-parallel group computes all of it.
    """

    step_seconds: float
    sequence_seconds: float
    round_seconds: float = 0.0
    share: float = 0.0

    def seconds(self, amounts: Amounts) -> float:
        return (
            self.step_seconds
            + self.sequence_seconds * amounts.sequences
            + self.round_seconds * amounts.scan_rounds
        )


@dataclass(frozen=True)
class Operators:
    """All operators of one model on one machine: a cost model."""

    shape: ModelShape
    layers: Waves
    head: Waves
    attention: Attention
    constants: Constants
    parallel: Parallel = ALONE

    def step_seconds(self, work: Sequence[Work]) -> float:
        amounts = self.shape.amounts(work)
        constant = self.constants
        serial, tensor = constant.share, self.parallel.tensor
        layers = self.layers.seconds(amounts.tokens)
        split = layers * (1 - serial) + self.head.seconds(amounts.rows)
        split += self.attention.seconds(amounts)
        return (
            split / tensor
            + layers * serial
            + constant.seconds(amounts)
            + self.parallel.message_seconds(amounts.tokens)
        )

"""The prices of an instance, by which routers, roles and loans compare it with others.

The cost models of this room price one step exactly.  A router prices a prompt on each of many
instances, for every request, so here exec(x, y) is a closed form: a price for a request, for each
token that is computed and for each pair of query and key, like the class (b) of MemServe §5.3.
"""

from bisect import bisect_left
from dataclasses import dataclass

from msgspec import Struct

from kvell.cost.amounts import ModelShape
from kvell.cost.model import (
    CHUNK_TOKENS,
    CostModel,
    batch_seconds,
    decode_seconds,
    prefill_seconds,
)

PROMPT_TOKENS_PER_OUTPUT_TOKEN = 4
"""Number of prompt tokens that cost as much as an output token.

Hundreds of prompt tokens share each reading of the weights, but an output token shares it only with
the other requests of its step.  In the measured forward passes of SmolLM2 a token of a step of 8
requests costs 1.7 to 9.4 times as much as one of a prompt of 512 (four machines;
their geometric mean is 3.3), and more in smaller steps.
"""
FIT_BATCH, FIT_CONTEXT_TOKENS = 8, 1024
"""Requests and context of the decode step that is priced, as in the measurement above."""
MANY_BATCH = 64
"""Requests of the decode step that shows what a further request adds."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of requests for which a decode step has a price of its own."""
ROUND_TRIP_SECONDS = 2e-4
"""Time of a message to an instance of another host and back, an assumption."""
ASKED_ROW_TOKENS = 5
"""A row's queries and records take as many bytes as the pages of about this number of tokens: 4.6
of SmolLM2 and 6.1 of Llama 3 8B (``bench.lending.partials``: a section over what is sent)."""
FIT_TOKENS = (1024, 8192)
"""Prompt lengths whose prices separate the cost of tokens from the cost of pairs."""
SHORTEST_SECONDS = 1e-9
"""Least price of what planners divide by."""


class ExecCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of a model on an instance, which it reports with its facts.

    The defaults are those of SmolLM2 on a server's cores: a least-squares fit to prompts
    on a Zen 5 (error 2 %), four prompt tokens for an output token,
    4.9 GB/s between processes of one host (``docs/mempool.md``) and
    12 GB/s to the CPU buffer (``kvell.cost.swap_rule``) for 23 KB a token.  A fetch begins with
    messages, which take as long as 64 tokens (``FEWEST_TOKENS`` of the front's histories).  Where
    only the ratios of prices matter, as in equation 1, the defaults suit other models too.

    :param request_seconds: of a prompt of any length.
    :param token_seconds: of a prompt token that is computed.
    :param pair_seconds: of a query that reads a key.
    :param output_token_seconds: of a token of a request that decodes.
    :param output_share: weight of a second of a request's answer, relative to a second before its
        first token.  With 0, answers gather where prefixes are; with 1, conversations leave their
        instances for slightly shorter steps (``bench/routing``).
    :param held_token_seconds: time that a token of a running request adds to each step.  The
        default is that of a query that reads a key: cores compute both alike.
    :param fetch_request_seconds: of a fetch of any length from another instance.
    :param fetch_token_seconds: of a token's pages from another instance.
    :param swap_token_seconds: of a token's pages from the CPU buffer.
    :param chunk_tokens: prompt tokens of a step, in which all running requests decode too.
    :param away_token_seconds: like ``held_token_seconds``, for a token whose pages are read at
        another instance of the host.  The default is the same: ``bench/lending/remote_share``
        measures no difference in the memory of one host.
    :param asked_step_seconds: of a decode step that asks another instance for attention over what
        it lends: a round trip for each layer.  The default is that of 30 layers.
    :param asked_row_seconds: of the queries and records of one request in such a step.
    :param natn_seconds: T^natn of Infinite-LLM's equation 5 for each of ``BATCHES``: a decode step
        of that batch without attention to earlier tokens, W(β)/f(β).  Empty: a line through the
        prices above.
    """

    request_seconds: float = 6e-3
    token_seconds: float = 2.6e-4
    pair_seconds: float = 1.6e-7
    output_token_seconds: float = PROMPT_TOKENS_PER_OUTPUT_TOKEN * 2.6e-4
    output_share: float = 0.5
    held_token_seconds: float = 1.6e-7
    fetch_request_seconds: float = 1.7e-2
    fetch_token_seconds: float = 4.7e-6
    swap_token_seconds: float = 1.9e-6
    chunk_tokens: int = CHUNK_TOKENS
    away_token_seconds: float = 1.6e-7
    asked_step_seconds: float = 30 * ROUND_TRIP_SECONDS
    asked_row_seconds: float = ASKED_ROW_TOKENS * 4.7e-6
    natn_seconds: tuple[float, ...] = ()

    def batch_seconds(self, batch: int) -> float:
        """Return W(β)/f(β) of Infinite-LLM's equation 5, over all layers.

        :param batch: one of ``BATCHES``.
        """
        if self.natn_seconds:
            return self.natn_seconds[BATCHES.index(batch)]
        each = self.output_token_seconds - self.request_seconds / FIT_BATCH
        each -= FIT_CONTEXT_TOKENS * self.held_token_seconds
        return self.request_seconds + batch * max(0.0, each)

    def step_seconds(self, batch: int, held_tokens: int) -> float:
        """Return the time of a decode step of any number of requests, equation 5.

        :param held_tokens: tokens that it reads.
        """
        above = min(bisect_left(BATCHES, batch, 1), len(BATCHES) - 1)
        low, high = BATCHES[above - 1], BATCHES[above]
        part = (batch - low) / (high - low)
        begin, end = self.batch_seconds(low), self.batch_seconds(high)
        return begin + part * (end - begin) + held_tokens * self.held_token_seconds

    def exec_seconds(self, prompt_tokens: int, cached_tokens: int, running: int = 0) -> float:
        """Return exec(x, y): the time from a prompt's first step to its first token.

        :param cached_tokens: tokens of the prompt that are not computed; at least one token is.
        :param running: requests that decode in the same steps.
        """
        new = max(1, prompt_tokens - cached_tokens)
        seconds = self.request_seconds + new * self.token_seconds
        seconds += pairs(prompt_tokens, cached_tokens) * self.pair_seconds
        if running:
            steps = -(-new // self.chunk_tokens)
            seconds += steps * running * self.output_token_seconds
        return seconds

    def fetch_seconds(self, tokens: int) -> float:
        """Return transfer(y, y') of equation 2: the time to fetch pages from another instance."""
        if tokens <= 0:
            return 0.0
        return self.fetch_request_seconds + tokens * self.fetch_token_seconds


USUAL_PRICES = ExecCosts()


@dataclass(frozen=True)
class InstancePrices:
    """Prices of an instance, with their origin.

    :param origin: ``defaults``, ``calibrated`` or ``from FILE``.
    :param swap_bytes_per_second: between the pool and the CPU buffer; 0: not measured.
    """

    costs: ExecCosts = USUAL_PRICES
    origin: str = "defaults"
    swap_bytes_per_second: float = 0.0


DEFAULT_PRICES = InstancePrices()


def describe_prices(costs: ExecCosts, origin: str) -> str:
    """Return prices in words: the rate of a prompt, the time of a decode step, their origin.

    A line of the memory contract has room for them.
    """
    tokens = FIT_TOKENS[0]
    rate = tokens / max(SHORTEST_SECONDS, costs.exec_seconds(tokens, 0))
    step_ms = 1e3 * FIT_BATCH * costs.output_token_seconds
    return f"{rate:,.0f} prompt tokens/s, {step_ms:,.1f} ms a step of {FIT_BATCH}; {origin}"


def pairs(prompt_tokens: int, cached_tokens: int) -> int:
    """Return the number of query-key pairs that full attention computes for a prompt: each new
    token reads all tokens before it and itself."""
    new = max(1, prompt_tokens - cached_tokens)
    return new * (2 * prompt_tokens - new + 1) // 2


def prices_of(
    model: CostModel,
    shape: ModelShape,
    *,
    fetch_bytes_per_second: float,
    swap_bytes_per_second: float,
    chunk_tokens: int = CHUNK_TOKENS,
    away_bytes_per_second: float | None = None,
    round_trip_seconds: float = ROUND_TRIP_SECONDS,
) -> ExecCosts:
    """Return the prices of a cost model, such as one of ``kvell calibrate``.

    They are taken from a prompt of one token and two long ones, so the prices of the long ones are
    exact for a model without windows, and nearly exact for others.

    :param shape: of the model's layers, for the bytes of a token.
    :param fetch_bytes_per_second: between two instances.
    :param swap_bytes_per_second: between the CPU buffer and the pool.
    :param away_bytes_per_second: of pages that are read in place at another instance; None: the
        speed of the own memory, which is right on one host.
    :param round_trip_seconds: to an instance that is asked for attention over what it lends, which
        each layer of full attention waits for.
    """
    request = prefill_seconds(model, 1, 0.0, chunk_tokens=chunk_tokens)
    long = FIT_TOKENS[-1]
    per_short, per_long = (
        max(0.0, prefill_seconds(model, tokens, 0.0, chunk_tokens=chunk_tokens) - request) / tokens
        for tokens in FIT_TOKENS
    )
    read_short, read_long = (pairs(tokens, 0) / tokens for tokens in FIT_TOKENS)
    pair = max(0.0, per_long - per_short) / (read_long - read_short)
    pair = min(pair, per_long / read_long)  # steps that only read weights make no tokens cheaper
    token_bytes = shape.stored_bytes(long) / long
    decodes = decode_seconds(model, [FIT_CONTEXT_TOKENS] * FIT_BATCH)
    many = decode_seconds(model, [FIT_CONTEXT_TOKENS] * MANY_BATCH)
    held = max(0.0, many - decodes) / ((MANY_BATCH - FIT_BATCH) * FIT_CONTEXT_TOKENS)
    away = 0.0 if away_bytes_per_second is None else token_bytes / away_bytes_per_second
    return ExecCosts(
        request_seconds=max(SHORTEST_SECONDS, request),
        token_seconds=max(0.0, per_long - pair * read_long),
        pair_seconds=pair,
        output_token_seconds=decodes / FIT_BATCH,
        held_token_seconds=held,
        fetch_token_seconds=max(SHORTEST_SECONDS, token_bytes / fetch_bytes_per_second),
        swap_token_seconds=token_bytes / swap_bytes_per_second,
        chunk_tokens=chunk_tokens,
        away_token_seconds=max(held, away),
        asked_step_seconds=round_trip_seconds * shape.asking_layers,
        asked_row_seconds=ASKED_ROW_TOKENS * token_bytes / fetch_bytes_per_second,
        natn_seconds=tuple(batch_seconds(model, batch) for batch in BATCHES),
    )

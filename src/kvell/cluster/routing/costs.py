"""The costs of prompts in seconds, for routing (MemServe §5.3, equations 1 and 2).

The cost models of :mod:`kvell.cost` price one step exactly.  A router prices a prompt on each of
many instances, for every request, so here exec(x, y) is a closed form: a price for a request, for
each token that is computed and for each pair of query and key, like the paper's class (b).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvell.cluster.routing.views import RequestView, RoutableInstance
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
FIT_TOKENS = (1024, 8192)
"""Prompt lengths whose prices separate the cost of tokens from the cost of pairs."""


@dataclass(frozen=True)
class ExecCosts:
    """Prices of a model on an instance; all instances are assumed to be alike.

    The defaults are those of SmolLM2 on a server's cores: a least-squares fit to prompts
    on a Zen 5 (error 2 %), four prompt tokens for an output token,
    4.9 GB/s between processes of one host (``docs/mempool.md``) and
    12 GB/s to the CPU buffer (:mod:`kvell.cost.swap_rule`) for 23 KB a token.  A fetch begins with
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

    def queues_seconds(
        self, instances: Sequence[RoutableInstance], request: RequestView
    ) -> list[float]:
        """Return a request's wait on each instance before its own prompt: the first term of
        equation 1.

        Earlier prompts are computed first.  The tokens that the instance holds lengthen all steps:
        those of the earlier prompts, of the request's own and, by ``output_share``, of its answer.
        The answers of other requests are no delay by themselves, since requests decode together.
        If any request decodes, a step is half over when the request arrives.  One call prices all
        instances, because a request may have a thousand to choose from.
        """
        hits, tokens, chunk = request.hits, request.prompt_tokens, self.chunk_tokens
        held_seconds = self.held_token_seconds
        half_step = self.request_seconds / 2
        answer_steps = 0.5 + self.output_share * request.output_tokens
        waits: list[float] = []
        for instance in instances:
            waiting = instance.uncached_prompt_tokens
            steps = answer_steps + (waiting + tokens - hits.get(instance.instance_id, 0)) / chunk
            seconds = steps * instance.held_tokens * held_seconds
            if instance.running_requests:
                seconds += half_step
            waits.append(seconds + self._prompts_seconds(instance) if waiting else seconds)
        return waits

    def first_token_seconds(
        self, instance: RoutableInstance, prompt_tokens: int, hit: int
    ) -> float:
        """Return the time to a request's first token: prompts go in turn, decodes share steps."""
        steps = -(-instance.uncached_prompt_tokens // self.chunk_tokens)
        decoding = steps * instance.running_requests * self.output_token_seconds
        prompt_seconds = self.exec_seconds(prompt_tokens, hit, instance.running_requests)
        return self._prompts_seconds(instance) + decoding + prompt_seconds

    def _prompts_seconds(self, instance: RoutableInstance) -> float:
        """Return the time to compute the waiting prompts, which share the fixed cost of steps."""
        tokens = instance.uncached_prompt_tokens
        return (
            -(-tokens // self.chunk_tokens) * self.request_seconds
            + tokens * self.token_seconds
            + instance.outstanding_pairs * self.pair_seconds
        )

    def fetch_seconds(self, tokens: int) -> float:
        """Return transfer(y, y') of equation 2: the time to fetch pages from another instance."""
        if tokens <= 0:
            return 0.0
        return self.fetch_request_seconds + tokens * self.fetch_token_seconds


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
) -> ExecCosts:
    """Return the prices of a cost model, such as one of ``kvell calibrate``.

    They are taken from a prompt of one token and two long ones, so the prices of the long ones are
    exact for a model without windows, and nearly exact for others.

    :param shape: of the model's layers, for the bytes of a token.
    :param fetch_bytes_per_second: between two instances.
    :param swap_bytes_per_second: between the CPU buffer and the pool.
    :param away_bytes_per_second: of pages that are read in place at another instance; None: the
        speed of the own memory, which is right on one host.
    """
    request = prefill_seconds(model, 1, 0.0, chunk_tokens=chunk_tokens)
    short, long = FIT_TOKENS
    per_short, per_long = (
        max(0.0, prefill_seconds(model, tokens, 0.0, chunk_tokens=chunk_tokens) - request) / tokens
        for tokens in FIT_TOKENS
    )
    pair = max(0.0, (per_long - per_short) / (pairs(long, 0) / long - pairs(short, 0) / short))
    token_bytes = shape.stored_bytes(long) / long
    decodes = decode_seconds(model, [FIT_CONTEXT_TOKENS] * FIT_BATCH)
    many = decode_seconds(model, [FIT_CONTEXT_TOKENS] * MANY_BATCH)
    held = max(0.0, many - decodes) / ((MANY_BATCH - FIT_BATCH) * FIT_CONTEXT_TOKENS)
    away = 0.0 if away_bytes_per_second is None else token_bytes / away_bytes_per_second
    return ExecCosts(
        request_seconds=request,
        token_seconds=max(0.0, per_long - pair * pairs(long, 0) / long),
        pair_seconds=pair,
        output_token_seconds=decodes / FIT_BATCH,
        held_token_seconds=held,
        fetch_token_seconds=token_bytes / fetch_bytes_per_second,
        swap_token_seconds=token_bytes / swap_bytes_per_second,
        chunk_tokens=chunk_tokens,
        away_token_seconds=max(held, away),
        natn_seconds=tuple(batch_seconds(model, batch) for batch in BATCHES),
    )


def pull_or_recompute(
    prompt_tokens: int, chosen: str, hits: Mapping[str, int], costs: ExecCosts
) -> tuple[str, ...]:
    """Return the instances from which to fetch more of a prompt's history; none if computing it is
    quicker (MemServe §5.3, equation 2).

    :param chosen: the instance that computes the request.
    :param hits: number of tokens that each instance has.
    :returns: ids, the instance with the most history first, then by id.
    """
    cached_tokens = hits.get(chosen, 0)
    here_seconds = costs.exec_seconds(prompt_tokens, cached_tokens)
    paying: list[tuple[int, str]] = []
    decisions: dict[int, bool] = {}
    for name, tokens in hits.items():
        if tokens > cached_tokens:
            pays = decisions.get(tokens)
            if pays is None:
                there_seconds = costs.exec_seconds(prompt_tokens, tokens)
                pays = costs.fetch_seconds(tokens - cached_tokens) <= here_seconds - there_seconds
                decisions[tokens] = pays
            if pays:
                paying.append((-tokens, name))
    return tuple(name for _, name in sorted(paying))

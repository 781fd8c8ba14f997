"""Statistics of a workload's requests, and the printed statistics of the paper it follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvell.simulator.traces.lengths import INFINITE_LLM, K
from kvell.simulator.traces.rows import TraceRow, ideal_hit_tokens, predecessors

Numbers = npt.NDArray[np.float64]
MEMSERVE = "MemServe §8.2, fig. 7"
MEMSERVE_NOTE = "the figure has no numbers in print"


@dataclass(frozen=True)
class Statistics:
    """Figures of one workload, in tokens; None for figures that a paper does not print.

    :param asked_tokens_mean: text tokens that a prompt adds to the turns before it.
    :param shared_share: part of the prompt tokens that an unbounded cache hits.
    :param context_tokens_mean: prompt and output together; so are ``_deviation`` and ``_max``.
    """

    requests: int | None = None
    sessions: int | None = None
    asked_tokens_mean: float | None = None
    prompt_tokens_mean: float | None = None
    output_tokens_mean: float | None = None
    prompt_per_output: float | None = None
    shared_share: float | None = None
    context_tokens_mean: float | None = None
    context_tokens_deviation: float | None = None
    context_tokens_max: float | None = None


def statistics(rows: Sequence[TraceRow]) -> Statistics:
    """Compute the figures of these rows (≥ 1)."""
    prompts = _tokens([row.prompt_tokens for row in rows])
    outputs = _tokens([row.output_tokens for row in rows])
    contexts = prompts + outputs
    return Statistics(
        requests=len(rows),
        sessions=len({row.session or index for index, row in enumerate(rows)}),
        asked_tokens_mean=float(np.mean(_asked(rows))),
        prompt_tokens_mean=float(prompts.mean()),
        output_tokens_mean=float(outputs.mean()),
        prompt_per_output=float((prompts / outputs).mean()),
        shared_share=ideal_hit_tokens(rows) / float(prompts.sum()),
        context_tokens_mean=float(contexts.mean()),
        context_tokens_deviation=float(contexts.std()),
        context_tokens_max=float(contexts.max()),
    )


@dataclass(frozen=True)
class PublishedWorkload:
    """A paper's description of a workload.

    :param says: in words, if the paper has no numbers or they do not fit the columns.
    """

    source: str
    says: str
    figures: Statistics = field(default_factory=Statistics)


def _fixed(prompt_tokens: int, output_tokens: int) -> PublishedWorkload:
    says = f"fixed length, {prompt_tokens // K}K in and {output_tokens // K}K out"
    figures = Statistics(
        prompt_tokens_mean=prompt_tokens,
        output_tokens_mean=output_tokens,
        prompt_per_output=prompt_tokens / output_tokens,
        context_tokens_deviation=0,
    )
    return PublishedWorkload("eLLM §6.1, fig. 11", says, figures)


PUBLISHED = {
    "sharegpt-like": PublishedWorkload(
        "vLLM (Kwon et al. 2023), fig. 11; MemServe §8.2",
        "turns follow answers; the longest answers of MemServe's three workloads",
        Statistics(asked_tokens_mean=161.31, output_tokens_mean=337.99),
    ),
    "loogle-like": PublishedWorkload(
        MEMSERVE,
        "the first 1K tokens of a document, five questions; long prompts, short answers, "
        f"much shared; {MEMSERVE_NOTE}",
    ),
    "react-like": PublishedWorkload(
        MEMSERVE,
        "a long two-shot example in each prompt; much shared; longer answers than LooGLE; "
        f"{MEMSERVE_NOTE}",
    ),
    "2k-2k": _fixed(2 * K, 2 * K),
    "32k-2k": _fixed(32 * K, 2 * K),
    "128k-8k": _fixed(128 * K, 8 * K),
    **{
        f"infinite-{number}": PublishedWorkload(
            "Infinite-LLM, table 1",
            f"trace {number}: context 1–{lengths.high // 1000}k; prompt, output not distinguished",
            Statistics(
                context_tokens_mean=lengths.mean,
                context_tokens_deviation=lengths.deviation,
                context_tokens_max=lengths.high,
            ),
        )
        for number, lengths in enumerate(INFINITE_LLM)
    },
}
"""The papers' descriptions, by generator."""


def _asked(rows: Sequence[TraceRow]) -> list[int]:
    """Return the tokens that each prompt adds to the turns before it."""
    return [
        row.prompt_tokens - (rows[before].num_tokens if row.continues and before is not None else 0)
        for row, before in zip(rows, predecessors(rows), strict=True)
    ]


def _tokens(counts: Sequence[int]) -> Numbers:
    return np.asarray(counts, np.float64)

"""Scenarios of a round, the same for every system; pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvell.load.arrivals import retime
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow

Figures = dict[str, float]
"""Figures of one scenario in one round; names end in their unit."""


@dataclass(frozen=True)
class Scenario:
    """Requests of one kind.

    :param requests: sent at once, or at ``rate`` if a workload is named.
    :param workload: of ``kvell bench workloads``; None has ``prompt_tokens`` and
        ``output_tokens`` in every request, unrelated prompts.
    :param rate: requests per second, Poisson.
    """

    name: str
    requests: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    workload: str | None = None
    rate: float = math.inf

    def rows(self, seed: int) -> list[TraceRow]:
        """The requests of a round; another seed draws other tokens."""
        if self.workload is None:
            row = TraceRow(0.0, self.prompt_tokens, self.output_tokens)
            return [row] * self.requests
        rows = generate_trace(self.workload, self.requests, seed)
        return retime(rows, rate=self.rate, seed=seed)

    @property
    def is_rectangular(self) -> bool:
        """Whether all requests are alike and arrive at once: one offline call can answer them."""
        return self.workload is None

    @property
    def figure(self) -> str:
        """The figure that systems are compared by; more is better."""
        is_prefill = self.workload is None and self.output_tokens == 1
        return ("prompt" if is_prefill else "output") + "_tokens_per_second"


def batches(sizes: Sequence[int], prompt_tokens: int, output_tokens: int) -> list[Scenario]:
    """A scenario for each size: that many requests at once."""
    return [Scenario(f"batch {size}", size, prompt_tokens, output_tokens) for size in sizes]


def prefill(prompt_tokens: int) -> Scenario:
    """One long prompt and one token."""
    return Scenario(f"prefill {prompt_tokens}", 1, prompt_tokens, 1)


def served(workload: str, rate: float, requests: int) -> Scenario:
    """A workload with Poisson arrivals."""
    return Scenario(f"{workload} at {rate:g}/s", requests, workload=workload, rate=rate)

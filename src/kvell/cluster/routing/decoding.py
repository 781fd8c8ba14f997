"""The choice of the instance that continues a request whose prompt another one has computed.

Its pages there need no transfer (MemServe §5.1, PD-Caching-2), but each request that it decodes
makes its steps longer.  Both are seconds, by the prices of each instance.
"""

from collections.abc import Sequence

from kvell.cluster.routing.policies import RoundRobin
from kvell.cluster.routing.views import RequestView, RoutableInstance


class EarliestEnd:
    """A policy that takes the instance where a request's answer ends first; equals in turn."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, request: RequestView, instances: Sequence[RoutableInstance]) -> str:
        """Return the instance with the shortest transfer and answer together.

        Requests that are on their way to an instance lengthen its steps like those that it has.
        """
        seconds = {view.instance_id: end_seconds(view, request) for view in instances}
        least = min(seconds.values())
        return self._turn.next_of(name for name, end in seconds.items() if end == least)


def end_seconds(instance: RoutableInstance, request: RequestView) -> float:
    """Return the time until an instance has fetched a request's missing pages and answered it."""
    costs = instance.report.facts.prices
    missing_tokens = max(0, request.prompt_tokens - request.hits.get(instance.instance_id, 0))
    batch = 1 + instance.running_requests + instance.num_coming
    held_tokens = request.prompt_tokens + instance.held_tokens + instance.coming_tokens
    step_seconds = costs.step_seconds(batch, held_tokens)
    return costs.fetch_seconds(missing_tokens) + request.output_tokens * step_seconds

"""One run on one server: preflight, load, and counters before and after."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvell.load.driver import Driver, Load
from kvell.load.http.preflight import served_model
from kvell.load.http.scrape import scrape
from kvell.load.http.wire import Client, Wire
from kvell.load.outcome import Outcome
from kvell.load.prompts import Prompts


@dataclass(frozen=True)
class LoadResult:
    """The results of a run.

    :param server: figures from the server's own counters; see
        :meth:`kvell.load.http.scrape.Counters.since`.
    """

    model: str
    outcomes: Sequence[Outcome]
    server: dict[str, Any]


async def measure(
    client: Client,
    base_url: str,
    wire: Wire,
    prompts: Prompts[Any],
    load: Load,
    on_ended: Callable[[int, int], None] = lambda _ended, _all: None,
) -> LoadResult:
    """Send a load and return its outcomes.

    :param wire: an empty model is replaced by the server's only one.
    :raises ChangeSomething: if the server does not answer or refuses the requests.
    """
    wire = replace(wire, model=await served_model(client, base_url, wire.model or None))
    before = await scrape(client)
    outcomes = await Driver(client, wire, prompts, load, on_ended).run()
    after = await scrape(client)
    return LoadResult(wire.model, outcomes, after.since(before))

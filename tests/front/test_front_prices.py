"""Instances of opposite prices behind one front: each is priced by what it reports of itself."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routing.costs import RequestView
from kvell.cluster.routing.policies import router_named
from kvell.cost.prices import USUAL_PRICES, ExecCosts
from kvell.engine.protocol.messages import Submit, Tokens
from kvell.engine.protocol.notices import IndexedGroup, IndexNotice
from kvell.front.request_queue import RequestQueue
from tests.front.scenarios import entry, stored
from tests.reports import facts

TEXT = range(2000)
QUICK = structs.replace(USUAL_PRICES, token_seconds=1e-6, fetch_token_seconds=1e-3)
"""Computes a token sooner than it fetches one."""
SLOW = structs.replace(USUAL_PRICES, token_seconds=1e-2, fetch_token_seconds=1e-6)


class Last:
    """A router that takes the last instance."""

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        return instances[-1].instance_id


def submitted(queue: RequestQueue, prices: tuple[ExecCosts, ExecCosts]) -> tuple[str, Submit]:
    """Route a text that mixed-0 has cached, and one token more."""
    for number, costs in enumerate(prices):
        own = facts(8, 1, indexed=(IndexedGroup("full", 4),), prices=costs)
        queue.open(f"mixed-{number}", own, joins_others=False)
    queue.on_event("mixed-0", IndexNotice(0, (stored(TEXT),)), 0.0)
    queue.add(entry(len(TEXT) + 1))
    (submission,) = queue.due(0.0)
    return submission


@pytest.mark.parametrize(
    ("prices", "chosen"), [((QUICK, SLOW), "mixed-0"), ((SLOW, QUICK), "mixed-1")]
)
def test_a_request_goes_to_whom_it_costs_less(
    prices: tuple[ExecCosts, ExecCosts], chosen: str
) -> None:
    queue = RequestQueue(8, router=router_named("prompt-tree"))
    assert submitted(queue, prices)[0] == chosen


@pytest.mark.parametrize(("prices", "source"), [((QUICK, SLOW), "mixed-0"), ((SLOW, QUICK), "")])
def test_pages_are_fetched_where_that_costs_less(
    prices: tuple[ExecCosts, ExecCosts], source: str
) -> None:
    queue = RequestQueue(8, router=Last(), locality=PrefixDirectory())
    name, submission = submitted(queue, prices)
    assert (name, submission.pulls_from) == ("mixed-1", source)


def test_a_prediction_follows_what_requests_took() -> None:
    """The second of two equal requests is predicted as long as the first one took."""
    queue = RequestQueue(8, router=Last())
    for number in range(2):
        queue.open(f"mixed-{number}", facts(8, 1), joins_others=False)
    predicted: list[float] = []
    for name in ("a", "b"):
        request = entry(len(TEXT), name=name)
        queue.add(request)
        assert [line for line, _ in queue.due(10.0)] == ["mixed-1"]
        assert request.predicted is not None
        predicted.append(request.predicted.seconds)
        queue.on_event("mixed-1", Tokens(request.request_id, 0, 0, (7,)), 10.0 + 3 * predicted[0])
    assert predicted[0] == USUAL_PRICES.exec_seconds(len(TEXT), 0)
    assert predicted[1] == pytest.approx(3 * predicted[0], rel=0.05)


def one_of(queue: RequestQueue, name: str, tokens: int, now: float) -> Submit:
    request = entry(tokens, name=name)
    queue.add(request)
    ((_, submission),) = queue.due(now)
    return submission


@pytest.mark.parametrize(("after", "source"), [(0.1, ""), (3.2, "mixed-0"), (9.0, "mixed-0")])
def test_an_instance_is_asked_for_pages_once_it_has_time(after: float, source: str) -> None:
    """mixed-0 has the text, and a prompt that takes longer than to compute it again."""

    class InTurn:
        def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
            return instances[request.prompt_tokens == len(TEXT) + 1].instance_id

    queue = RequestQueue(8, router=InTurn(), locality=PrefixDirectory())
    for number in range(2):
        own = facts(8, 1, indexed=(IndexedGroup("full", 4),))
        queue.open(f"mixed-{number}", own, joins_others=False)
    queue.on_event("mixed-0", IndexNotice(0, (stored(TEXT),)), 0.0)
    assert not one_of(queue, "long", 3 * len(TEXT), 0.0).pulls_from
    assert one_of(queue, "text", len(TEXT) + 1, after).pulls_from == source


def test_equal_instances_of_a_host_learn_together() -> None:
    queue = RequestQueue(8, router=Last())
    hosts = ("", "", "", "other")
    for number, host in enumerate(hosts):
        costs = SLOW if number == 2 else USUAL_PRICES
        queue.open(f"mixed-{number}", facts(8, 1, host=host, prices=costs), joins_others=False)
    paces = [queue.line(f"mixed-{number}").pace for number in range(4)]
    assert paces[0].shared is paces[1].shared
    assert len({id(pace.shared) for pace in paces}) == 3
    assert paces[0].crowd is paces[1].crowd is paces[2].crowd
    assert paces[3].crowd is not paces[0].crowd


def test_nothing_is_predicted_without_a_choice() -> None:
    queue = RequestQueue(8)
    queue.open("mixed-0", facts(8, 1), joins_others=False)
    request = entry(10)
    queue.add(request)
    assert len(queue.due(0.0)) == 1
    assert request.predicted is None

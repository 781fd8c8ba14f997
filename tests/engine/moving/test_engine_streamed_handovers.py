"""Which requests are offered while their last chunk is computed, and what becomes of that."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvell.engine.requests.plan import StepPlan
from kvell.mempool.transfers.actions import Action, Ended, Grant, Revoke, Send
from kvell.mempool.transfers.messages import Abandon, Offer, PeerMessage
from kvell.mempool.transfers.methods import ALWAYS, StreamCosts
from tests.engine.moving.handing_over import Cluster, Entry, Instance
from tests.engine.moving.machine import MIXES, cluster_of, prompt_of
from tests.engine.virtual_model import expected_output


def streamed(cluster: Cluster, name: str = "p") -> list[StepPlan]:
    return [plan for plan in cluster.instances[name].plans if plan.streams]


def roomed(
    cluster: Cluster, length: int = 23, max_tokens: int = 9, name: str = "r", family: int = 1
) -> Entry:
    entry = Entry(prompt_of(family, length), max_tokens, "")
    cluster.submit(name, entry, "p", "d")
    while cluster.messages:
        cluster.deliver(0)
    return entry


def offers(messages: Sequence[tuple[str, int, str, PeerMessage]]) -> list[Offer]:
    return [one[3] for one in messages if isinstance(one[3], Offer)]


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("length", [1, 8, 23])
@pytest.mark.parametrize("batched", [4, 16])
def test_the_step_of_the_last_chunk_streams(mix: str, length: int, batched: int) -> None:
    cluster = cluster_of(mix, batched=batched, streams=ALWAYS)
    entry = Entry(prompt_of(1, length), 9, "")
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    (plan,) = streamed(cluster)
    (work,) = plan.work
    assert (work.start + work.count, cluster.moved) == (length, 1)
    assert entry.emitted == expected_output(entry.prompt, 9)
    assert not streamed(cluster, "d")


def test_pages_are_offered_before_the_step_runs_and_again_behind_it() -> None:
    cluster = cluster_of(streams=ALWAYS)
    roomed(cluster, 12)
    instance = cluster.instances["p"]
    plan = instance.engine.plan()
    before = instance.core.pool.take_actions()
    grant, send = before
    assert isinstance(grant, Grant) and isinstance(send, Send)
    early = send.message
    assert isinstance(early, Offer) and early.stages == len(MIXES["windows"]) * 2
    assert plan.streams == (early.transfer.number,) and not early.private
    cluster.act(instance, before)
    instance.plans.append(plan)
    cluster.hear(instance, instance.engine.commit(instance.model.run(plan)))
    first, second = offers(cluster.messages)
    assert (first, second.pages, second.stages) == (early, early.pages, 0)
    assert second.private
    cluster.settle()
    cluster.check_ends()


def test_without_costs_or_where_it_does_not_pay_nothing_streams() -> None:
    for costs in (None, StreamCosts(1e9, 1.0, 1.0, 1e-6, 0.0)):
        cluster = cluster_of(streams=costs)
        roomed(cluster)
        cluster.settle()
        cluster.check_ends()
        assert cluster.moved == 1 and not streamed(cluster)


def test_nothing_streams_of_a_text_that_is_there() -> None:
    """Only what the other side lacks would be pulled."""
    cluster = cluster_of(streams=ALWAYS)
    roomed(cluster, 24, name="one")
    cluster.settle()
    assert len(streamed(cluster)) == 1
    blank = Entry(prompt_of(1, 24), 3, "")
    cluster.submit("two", blank, "e", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 2
    assert not streamed(cluster, "e")


def test_a_request_that_has_no_room_yet_or_stays_does_not_stream() -> None:
    cluster = cluster_of(streams=ALWAYS)
    cluster.submit("stays", Entry(prompt_of(2, 20), 5, ""), "p", "")
    cluster.step("p")
    cluster.settle()
    cluster.check_ends()
    assert not streamed(cluster)


def test_several_requests_stream_in_one_step() -> None:
    cluster = cluster_of(batched=40, streams=ALWAYS)
    roomed(cluster, 12, name="one")
    roomed(cluster, 15, name="two", family=2)
    cluster.settle()
    cluster.check_ends()
    assert [len(plan.streams) for plan in streamed(cluster)] == [2]


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "ends"])
def test_an_answer_that_ends_takes_its_pages_back_first(is_cancelled: bool) -> None:
    """With its only token, or because nobody waits for it any more."""
    cluster = cluster_of(streams=ALWAYS)
    roomed(cluster, 12, max_tokens=9 if is_cancelled else 1)
    instance = cluster.instances["p"]
    plan = instance.engine.plan()
    cluster.act(instance, instance.core.pool.take_actions())
    (transfer,) = instance.granted
    instance.plans.append(plan)
    if is_cancelled:
        cluster.cancel("r")
    told: list[Action] = []
    act = cluster.act

    def noting(at: Instance, some: Sequence[Action]) -> None:
        told.extend(some)
        act(at, some)

    cluster.act = noting  # type: ignore[method-assign, assignment]
    cluster.hear(instance, instance.engine.commit(instance.model.run(plan)))
    assert told[0] == Revoke(transfer) and not instance.granted
    assert not any(isinstance(action, Ended) for action in told)
    assert any(isinstance(a, Send) and isinstance(a.message, Abandon) for a in told)
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 0


def test_an_instance_that_dies_while_it_is_pulled_from_loses_no_token() -> None:
    cluster = cluster_of(streams=ALWAYS)
    entry = roomed(cluster, 12)
    instance = cluster.instances["p"]
    instance.plans.append(instance.engine.plan())
    cluster.act(instance, instance.core.pool.take_actions())
    while cluster.messages:
        cluster.deliver(0)
    assert cluster.instances["d"].copying
    cluster.crash("p")
    cluster.settle()
    cluster.check_ends()
    assert entry.emitted == expected_output(entry.prompt, 9)


def test_plans_differ_by_what_streams() -> None:
    """A replay that streams otherwise is not the same."""
    cluster = cluster_of(streams=ALWAYS)
    roomed(cluster, 12)
    cluster.settle()
    (plan,) = streamed(cluster)
    assert plan != replace(plan, streams=())
    assert plan == replace(plan)

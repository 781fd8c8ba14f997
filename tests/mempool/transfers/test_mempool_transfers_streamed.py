"""Texts that are pulled while they are computed: offered twice, and told of in between."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvell.mempool.entries import Heard, PullEnded
from kvell.mempool.exchanges import FIRST_TICKS
from kvell.mempool.transfers.actions import (
    Action,
    Ended,
    Grant,
    Pull,
    PullRest,
    Revoke,
    Send,
    StopPull,
)
from kvell.mempool.transfers.messages import Abandon, Offer, PeerMessage, Prepared, Pulled, Written
from tests.mempool.transfers.network import STAGES, Instance, Network, ints
from tests.mempool.transfers.runs import MIXES, quiet, run

TEXT = list(range(20))
every_mix = pytest.mark.parametrize("mix", list(MIXES))


def announced(mix: str = "all") -> Network:
    network = quiet(mix)
    assert network.announce("a", "b", TEXT, True, 600_000)
    run(network)
    return network


def streaming(mix: str = "all") -> Network:
    """The same, once "b" has begun to pull it."""
    network = announced(mix)
    network.begin_pass("a", 0)
    network.deliver(0)
    assert len(network.instances["b"].copying) == 1
    return network


def finish(network: Network) -> None:
    while network.instances["a"].passes:
        network.write("a", 0)
    run(network)


def run_losing(network: Network, kind: type[PeerMessage]) -> None:
    """Deliver what was said so far without a kind of message, and copy as far as that goes."""
    for _ in range(len(network.messages)):
        network.deliver(0, loses=isinstance(network.messages[0][3], kind))
    network.copy("b", 0, 99)


def check_came(network: Network) -> None:
    """What was computed at "a" is cached at "b", and neither is owed anything."""
    sender, receiver = network.instances["a"], network.instances["b"]
    assert list(sender.ended.values()) == [""]
    assert list(receiver.arrived.values()) == [len(TEXT)]
    assert receiver.core.peek(ints([*TEXT, 99]), "") == len(TEXT)
    receiver.compute(TEXT)  # checks what is in the pages
    assert not sender.granted and not len(sender.holds) and not len(receiver.holds)
    assert sender.agent.next_deadline is receiver.agent.next_deadline is None


@every_mix
def test_stages_come_as_they_are_written_and_count_behind_the_second_offer(mix: str) -> None:
    network = streaming(mix)
    receiver = network.instances["b"]
    (copying,) = receiver.copying.values()
    cells, came = len(copying.left), []
    for _ in range(STAGES):
        network.copy("b", 0, 99)
        came.append(receiver.cells_early)
        network.write("a", 0)
        network.deliver(0)
    network.copy("b", 0, 99)
    assert came[0] == 0 < came[1] < came[2] < receiver.cells_early <= cells
    assert not receiver.arrived, "the second offer has not come"
    finish(network)
    check_came(network)


@every_mix
def test_no_hint_comes_and_all_comes_behind_the_second_offer(mix: str) -> None:
    network = streaming(mix)
    while network.instances["a"].passes:
        network.write("a", 0)
    run_losing(network, Written)
    assert network.instances["b"].cells_early == 0
    run(network)
    check_came(network)


def test_hints_that_come_late_twice_and_out_of_order_change_nothing() -> None:
    network = streaming()
    for _ in range(STAGES):
        network.write("a", 0)
    network.deliver(2, keeps=True)
    network.copy("b", 0, 5)
    network.deliver(0, keeps=True)
    finish(network)
    check_came(network)


@pytest.mark.parametrize("lost", [0, 1], ids=["first", "second"])
def test_an_offer_that_got_lost(lost: int) -> None:
    """Without the first, the second is an ordinary one; the second is said again."""
    network = announced()
    network.begin_pass("a", 0)
    network.deliver(0, loses=lost == 0)
    while network.instances["a"].passes:
        network.write("a", 0)
    if lost:
        run_losing(network, Offer)
        assert not network.instances["b"].arrived
        network.pass_time(FIRST_TICKS)
    run(network)
    assert bool(network.instances["b"].cells_early) == bool(lost)
    check_came(network)


def test_an_offer_that_comes_behind_the_second_one_is_none() -> None:
    network = announced()
    network.begin_pass("a", 0)
    while network.instances["a"].passes:
        network.write("a", 0)
    network.deliver(len(network.messages) - 1)
    (copying,) = network.instances["b"].copying.values()
    assert copying.is_whole and not copying.pull.stages
    run(network)
    check_came(network)


def test_room_that_is_told_again_is_answered_with_the_newest_offer() -> None:
    network = announced()
    network.begin_pass("a", 0)
    network.deliver(0, loses=True)
    network.pass_time(FIRST_TICKS)  # both say again what is not answered
    offers: list[Offer] = []
    while network.messages:
        message = network.messages[0][3]
        offers += [message] if isinstance(message, Offer) else []
        network.deliver(0, loses=isinstance(message, Offer))
    assert [one.stages for one in offers] == [STAGES, STAGES]
    while network.instances["a"].passes:
        network.write("a", 0)
    network.messages.clear()
    sender = network.instances["a"]
    (transfer,) = sender.owners
    told = Heard("b", Prepared(transfer, b""))
    (answer,) = sender.agent.handle(told)
    assert isinstance(answer, Send) and isinstance(answer.message, Offer)
    assert answer.message.stages == 0
    network.act(sender, [answer])
    run(network)
    check_came(network)


@pytest.mark.parametrize("written", range(STAGES + 1))
def test_a_pass_that_is_given_up_takes_back_what_it_offered(written: int) -> None:
    network = streaming()
    for _ in range(written):
        network.write("a", 0)
    network.copy("b", 0, 3)
    sender, receiver = network.instances["a"], network.instances["b"]
    (transfer,) = sender.owners
    actions = sender.sending.cancel(transfer, "nobody waits for it")
    assert actions[:2] == [Revoke(transfer), Ended(transfer, "nobody waits for it")]
    network.act(sender, actions)
    assert not len(sender.holds)
    sender.compute(list(range(100, 150)))  # others have its pages
    run(network)
    assert not receiver.arrived and not len(receiver.holds)
    assert receiver.core.peek(ints([*TEXT, 99]), "") == 0


def test_pages_that_lie_elsewhere_than_was_offered_end_it_before_others_get_them() -> None:
    network = streaming()
    sender = network.instances["a"]
    (one,) = sender.passes.values()
    (transfer,) = sender.owners
    places = {key: page + 1 for key, page in sender.holds.places(one.owner).items()}
    actions = sender.sending.ready(transfer, places)
    assert actions[0] == Revoke(transfer)
    network.act(sender, actions)
    run(network)
    assert list(sender.ended.values()) == ["the pages differ from the first offer"]
    assert not len(network.instances["b"].holds)


def test_a_text_whose_pages_are_not_all_there_is_offered_when_it_is_computed() -> None:
    network = announced()
    sender = network.instances["a"]
    (transfer,) = sender.owners
    assert sender.sending.missing(transfer)
    assert sender.sending.early(transfer, {}, STAGES) == []
    finish(network)
    check_came(network)


def test_without_room_nothing_is_offered_early() -> None:
    network = quiet()
    network.announce("a", "b", TEXT, True, 600_000)
    sender = network.instances["a"]
    (transfer,) = sender.owners
    assert sender.sending.missing(transfer) == []
    network.begin_pass("a", 0)
    assert not sender.granted
    finish(network)
    check_came(network)


def test_the_right_is_granted_with_the_first_offer_and_once() -> None:
    network = announced()
    sender = network.instances["a"]
    (transfer,), (one,) = sender.owners, sender.passes.values()
    places = sender.holds.places(one.owner)

    def grants(actions: Sequence[Action]) -> list[Action]:
        return [action for action in actions if isinstance(action, Grant)]

    first = sender.sending.early(transfer, places, STAGES)
    pairs = [[group, places[group, at]] for group, at in sender.sending.missing(transfer)]
    assert pairs
    assert grants(first) == [Grant(transfer, "b", np.asarray(pairs, "<i4").tobytes())]
    assert sender.sending.early(transfer, places, STAGES) == []
    assert sender.sending.on_pulled("b", Pulled(transfer)) == [], "it is not whole yet"
    assert grants(sender.sending.ready(transfer, places)) == []
    assert sender.sending.early(transfer, places, STAGES) == []
    assert sender.sending.on_pulled("b", Pulled(transfer))[0] == Revoke(transfer)


def offered(receiver: Instance, network: Network) -> Offer:
    (transfer,) = network.instances["a"].owners
    missing = network.instances["a"].sending.missing(transfer)
    return Offer(transfer, ints(range(len(missing))).tobytes(), stages=STAGES)


def test_a_second_offer_of_other_pages_ends_it() -> None:
    network = announced()
    receiver = network.instances["b"]
    first = offered(receiver, network)
    (pull,) = receiver.receiving.offer("a", first)
    assert isinstance(pull, Pull) and pull.stages == STAGES
    other = Offer(first.transfer, first.pages[::-1])
    stop, answer = receiver.receiving.offer("a", other)
    assert stop == StopPull(first.transfer)
    assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    receiver.receiving.on_pulled(first.transfer, "it was stopped")
    assert not len(receiver.holds)


def test_offers_that_are_said_again_do_nothing() -> None:
    network = announced()
    receiver = network.instances["b"]
    first = offered(receiver, network)
    second = Offer(first.transfer, first.pages, b"told")
    assert len(receiver.receiving.offer("a", first)) == 1
    assert receiver.receiving.offer("a", first) == []
    assert receiver.receiving.offer("a", second) == [PullRest(first.transfer)]
    assert receiver.receiving.offer("a", second) == []
    assert receiver.receiving.offer("a", first) == []
    sent, arrived = receiver.receiving.on_pulled(first.transfer, "")
    assert sent == Send("a", Pulled(first.transfer))
    assert getattr(arrived, "private", b"") == b"told"
    assert receiver.receiving.offer("a", first) == [Send("a", Pulled(first.transfer))]


def test_a_pull_that_fails_before_the_second_offer_ends_it() -> None:
    network = streaming()
    receiver = network.instances["b"]
    (transfer,) = receiver.copying
    receiver.copying.clear()
    network.act(receiver, receiver.agent.handle(PullEnded(transfer, "its memory is broken")))
    assert not len(receiver.holds)
    finish(network)
    assert list(network.instances["a"].ended.values()) == ["its memory is broken"]


@pytest.mark.parametrize("stages", [-1, STAGES])
def test_an_early_offer_of_too_few_pages_or_nonsense_ends_it(stages: int) -> None:
    network = announced()
    receiver = network.instances["b"]
    first = offered(receiver, network)
    pages = first.pages if stages < 0 else first.pages[:-1]
    (answer,) = receiver.receiving.offer("a", Offer(first.transfer, pages, stages=stages))
    assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    assert not len(receiver.holds)


def test_an_agent_leaves_hints_to_whoever_copies() -> None:
    network = streaming()
    for name, instance in network.instances.items():
        for transfer in network.instances["a"].owners:
            assert instance.agent.handle(Heard("a", Written(transfer, 0))) == [], name
    finish(network)
    check_came(network)

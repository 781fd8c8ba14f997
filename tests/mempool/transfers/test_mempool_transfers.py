"""Transfers over a network that loses, doubles and delays; and peers that say anything."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.agent import layout_fingerprint
from kvell.mempool.entries import Heard, PeerEntry, PullEnded, Ticked
from kvell.mempool.exchanges import FIRST_TICKS, LONGEST_TICKS
from kvell.mempool.transfers.actions import Ended, Fetched, Pull, Send, StopPull
from kvell.mempool.transfers.messages import (
    Abandon,
    Ask,
    Declined,
    Offer,
    PeerMessage,
    Prepare,
    Prepared,
    Pulled,
    Transfer,
)
from kvell.pages.layout import GroupSpec
from tests.depth import many
from tests.mempool.transfers.network import Instance, Network, ints
from tests.mempool.transfers.runs import MIXES, quiet, run
from tests.pages.pools import pool_of


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("count", [4, 9, 23])
def test_a_text_that_was_sent_is_a_hit_there(mix: str, count: int) -> None:
    network, text = quiet(mix), list(range(count))
    network.instances["a"].compute(text)
    assert network.send("a", "b", text, True, 100)
    run(network)
    receiver = network.instances["b"]
    assert receiver.core.peek(ints([*text, 99]), "") == count
    assert list(network.instances["a"].ended.values()) == [""]
    assert network.instances["a"].core.peek(ints([*text, 99]), "") == count
    receiver.compute(text)  # checks what is in the pages


def pulled_rows(network: Network, source: str, target: str, text: list[int]) -> int:
    network.send(source, target, text, True, 100)
    rows = 0
    while network.messages:
        network.deliver(0)
        for copying in network.instances[target].copying.values():
            rows = max(rows, len(copying.left))
        for name in network.instances:
            network.copy(name, 0, 99)
    return rows


@pytest.mark.parametrize("mix", ["full", "window"])
def test_only_what_is_missing_crosses(mix: str) -> None:
    """The next turn of a conversation sends the turn, not the conversation (PD-Caching-2)."""
    network, text = quiet(mix), list(range(24))
    network.instances["a"].compute(text)
    whole = pulled_rows(network, "a", "b", text)
    network.instances["a"].compute([*text, *range(100, 108)])
    turn = pulled_rows(network, "a", "b", [*text, *range(100, 108)])
    assert 0 < turn < whole
    assert pulled_rows(network, "a", "b", [*text, *range(100, 108)]) == 0


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("known", [0, 12])
def test_what_was_asked_for_is_copied_as_far_as_it_is_not_here(mix: str, known: int) -> None:
    network, text = quiet(mix), list(range(24))
    network.instances["a"].compute(text)
    if known:
        network.instances["b"].compute(text[:known])
    number = network.ask("b", "a", [*text, 5, 5], 100)
    run(network)
    asker = network.instances["b"]
    fetched = asker.fetched[number]
    assert fetched == Fetched(number, 24, "", fetched.pages) and sum(fetched.pages) > 0
    asker.compute(text)  # checks what is in the pages


def test_an_ask_is_declined_with_its_reason() -> None:
    network, text = quiet("full"), list(range(24))
    other = Network(MIXES["window"], 40)
    other.start("c")
    network.instances["c"] = other.instances["c"]
    network.instances["a"].compute(text[:9])
    network.instances["b"].compute(text[:9])
    network.ask("b", "a", text, 100)
    network.ask("b", "c", text, 100)
    run(network)
    assert [one.problem for one in network.instances["b"].fetched.values()] == [
        "no more of it is cached",
        "the layouts of the two instances differ",
    ]


def test_an_ask_ends_with_its_deadline_its_owners_death_or_for_want_of_room() -> None:
    network, text = quiet("full"), list(range(60))
    small = Network(MIXES["full"], 2)
    small.start("b")
    asker = network.instances["b"] = small.instances["b"]
    network.instances["a"].compute(text)
    network.ask("b", "a", text, 100)
    run(network)
    network.ask("b", "a", text, 100)
    network.crash("a")
    network.ask("b", "c", text, 100)
    network.pass_time(200)
    problems = [one.problem for one in asker.fetched.values()]
    assert problems == ["there is no room", "a died", "it timed out"]
    network.settle()


@pytest.mark.parametrize("inserts", [True, False])
def test_what_the_receiver_has_longer_is_not_overwritten(inserts: bool) -> None:
    """The sender's last page has a token less of the same text than the receiver's."""
    network, text = quiet("full"), list(range(26))
    network.instances["c"].compute(text[:25])
    network.instances["a"].compute(text)
    network.send("c", "a", text, inserts, 100)
    run(network)
    receiver = network.instances["a"]
    assert list(receiver.arrived.values()) == [26]
    receiver.compute(text)  # checks what is in the pages
    assert list(network.instances["c"].ended.values()) == [""]


@pytest.mark.parametrize(
    ("mix", "large_pages", "tokens", "problem"),
    [
        ("window", 40, 12, "the layouts of the two instances differ"),
        ("full", 2, 60, "there is no room"),
    ],
)
def test_another_layout_and_no_room_are_said_and_nothing_is_held(
    mix: str, large_pages: int, tokens: int, problem: str
) -> None:
    network = quiet("full", 40)
    other = Network(MIXES[mix], large_pages)
    other.start("b")
    network.instances["b"] = other.instances["b"]
    network.instances["a"].compute(list(range(tokens)))
    network.send("a", "b", list(range(tokens)), True, 100)
    run(network)
    assert list(network.instances["a"].ended.values()) == [problem]
    assert not len(network.instances["b"].holds)


def test_a_reader_that_wakes_late_discards_what_it_read() -> None:
    """The sender gave up and its pages hold something else: the copy must not count."""
    network, text = quiet("full", 8), list(range(16))
    network.instances["a"].compute(text)
    network.send("a", "b", text, True, 5)
    network.deliver(0)  # Prepare
    network.deliver(0)  # Prepared
    network.deliver(0)  # Offer
    network.copy("b", 0, 1)
    sender = network.instances["a"]
    network.act(sender, sender.sending.tick(10))
    for number in range(4):
        sender.compute(list(range(1000 * number, 1000 * number + 60)))
    network.copy("b", 0, 99)
    assert not network.instances["b"].arrived
    assert network.instances["b"].core.peek(ints([*text, 99]), "") == 0
    network.settle()


def test_pages_are_not_given_to_others_while_a_copy_writes_into_them() -> None:
    network, text = quiet("full", 40), list(range(16))
    network.instances["a"].compute(text)
    network.send("a", "b", text, True, 5)
    for _ in range(3):
        network.deliver(0)
    receiver = network.instances["b"]
    network.act(receiver, receiver.receiving.tick(1000))
    assert len(receiver.holds) == 1  # the copy has not ended
    network.copy("b", 0, 0)
    assert not len(receiver.holds)
    network.settle()


def run_losing_the_first(network: Network, kind: type[PeerMessage]) -> None:
    """Run until nothing is under way but waiting; one message of a kind gets lost."""
    (index,) = (n for n, one in enumerate(network.messages) if isinstance(one[3], kind))
    network.deliver(index, loses=True)
    run(network)


@pytest.mark.parametrize("is_announced_early", [False, True])
@pytest.mark.parametrize("kind", [Prepare, Prepared, Offer, Pulled])
def test_what_gets_lost_is_said_again(kind: type[PeerMessage], is_announced_early: bool) -> None:
    network, text = quiet(), list(range(20))
    network.instances["a"].compute(text)
    network.send("a", "b", text, True, 600_000, is_ready=not is_announced_early)
    while not any(isinstance(one[3], kind) for one in network.messages):
        if network.messages:
            network.deliver(0)
        elif not any(one.copying for one in network.instances.values()):
            network.ready("a")
        network.copy("b", 0, 99)
    run_losing_the_first(network, kind)
    assert not network.instances["a"].ended
    network.pass_time(FIRST_TICKS)
    run(network)
    network.ready("a")
    run(network)
    assert list(network.instances["a"].ended.values()) == [""]
    assert len(network.instances["b"].arrived) == 1
    assert network.instances["b"].core.peek(ints([*text, 99]), "") == 20
    assert network.instances["a"].agent.next_deadline is None
    assert network.instances["b"].agent.next_deadline is None


def test_a_hold_ends_soon_though_nobody_heard_that_its_transfer_is_given_up() -> None:
    network, text = quiet(), list(range(20))
    network.instances["a"].compute(text)
    network.send("a", "b", text, False, 600_000, is_ready=False)
    run(network)
    assert len(network.instances["b"].holds) == 1
    sender = network.instances["a"]
    (transfer,) = sender.owners
    network.act(sender, sender.sending.cancel(transfer, "nobody waits for it"))
    run_losing_the_first(network, Abandon)
    assert len(network.instances["b"].holds) == 1
    network.pass_time(FIRST_TICKS)
    run(network)
    assert not len(network.instances["b"].holds)


def test_an_answer_is_awaited_twice_as_long_each_time_and_never_for_minutes() -> None:
    network, text = quiet(), list(range(20))
    network.instances["a"].compute(text)
    network.send("a", "b", text, True, 600_000)
    said = []
    for now in range(0, 80_000, 1_000):
        while network.messages:
            said.append(now)
            network.deliver(0, loses=True)
        network.pass_time(1_000)
    assert LONGEST_TICKS == 16_000
    assert said == [0, 2_000, 6_000, 14_000, 30_000, 46_000, 62_000, 78_000]


@pytest.mark.parametrize("computed", [0, 99])
def test_nonsense_is_refused(computed: int) -> None:
    receiver = Instance("b", 1, MIXES["full"], 20)
    fingerprint = layout_fingerprint(receiver.core.layout.groups, "float32")
    transfer = Transfer("a", 1, 1)
    prepare = Prepare(transfer, fingerprint, ints([1, 2, 3]).tobytes(), computed, "", "", 9, True)
    for sender, message in [("a", prepare), ("c", prepare)]:
        (answer,) = receiver.receiving.prepare(sender, message, 0)
        assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    (answer,) = receiver.receiving.offer("a", Offer(transfer, b""))
    assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    assert not len(receiver.holds)


def test_an_offer_of_other_pages_than_were_missing_ends_it() -> None:
    receiver = Instance("b", 1, MIXES["full"], 20)
    fingerprint = layout_fingerprint(receiver.core.layout.groups, "float32")
    transfer = Transfer("a", 1, 1)
    text = ints(list(range(9))).tobytes()
    (prepared,) = receiver.receiving.prepare(
        "a", Prepare(transfer, fingerprint, text, 9, "", "", 9, True), 0
    )
    assert isinstance(prepared, Send) and isinstance(prepared.message, Prepared)
    assert np.frombuffer(prepared.message.missing, "<i4").tolist() == [0, 0, 0, 1, 0, 2]
    (answer,) = receiver.receiving.offer("a", Offer(transfer, ints([1]).tobytes()))
    assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    assert not len(receiver.holds)


def test_fingerprints_differ_by_what_a_page_holds_only() -> None:
    def of(groups: list[GroupSpec], content: str = "float32") -> str:
        return layout_fingerprint(pool_of(9, *groups).groups, content)

    told = {of(groups) for groups in MIXES.values()} | {of(MIXES["full"], "bfloat16")}
    assert len(told) == len(MIXES) + 1
    assert of(MIXES["all"]) == layout_fingerprint(pool_of(30, *MIXES["all"]).groups, "float32")


TEXT = list(range(9))
HORIZON_TICKS = 2_000_000
"""Longer than anything is held for another."""

NUMBERS = st.sampled_from([-(1 << 62), -1, 0, 1, 8, 9, 10, 1 << 31, 1 << 62])
PAIRS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 1 << 30]), max_size=12)
BYTES = st.one_of(
    st.binary(max_size=9), PAIRS.map(lambda numbers: np.array(numbers, "<i4").tobytes())
)


def between(network: Network) -> tuple[Transfer, Prepare]:
    network.instances["a"].compute(TEXT)
    assert network.send("a", "b", TEXT, True, 100)
    [message] = [one for *_, one in network.messages if isinstance(one, Prepare)]
    return message.transfer, message


@st.composite
def changed(draw: st.DrawFn, transfer: Transfer, prepare: Prepare) -> PeerMessage:
    """A message about that transfer, or a new one, of which any field may be anything."""
    other = Transfer(transfer.sender, transfer.incarnation, transfer.number + 7)
    named = draw(st.sampled_from([transfer, other]))
    text, print_ = prepare.tokens, prepare.fingerprint
    message: msgspec.Struct = draw(
        st.sampled_from(
            [
                msgspec.structs.replace(prepare, transfer=named),
                Prepared(named, b""),
                Offer(named, b""),
                Pulled(named),
                Abandon(named, "why"),
                Ask(1, 1, print_, text, "", "", 0, 100),
                Declined(1, 1, "why"),
            ]
        )
    )
    for field in draw(st.lists(st.sampled_from(message.__struct_fields__), max_size=2)):
        value = getattr(message, field)
        if isinstance(value, bool | Transfer | str):
            continue
        new = draw(NUMBERS if isinstance(value, int) else BYTES)
        message = msgspec.structs.replace(message, **{field: new})
    assert isinstance(message, PeerMessage)
    return message


def act(instance: Instance, entry: PeerEntry, pulls: set[Transfer]) -> None:
    """Hand something to an agent; copying ends when it is stopped, or with the test."""
    for action in instance.agent.handle(entry):
        if isinstance(action, Pull):
            pulls.add(action.transfer)
        elif isinstance(action, StopPull):
            pulls.remove(action.transfer)
            act(instance, PullEnded(action.transfer, "it was stopped"), pulls)
        elif isinstance(action, Ended) and action.transfer in instance.owners:
            instance.holds.release(instance.owners.pop(action.transfer))
    instance.audit()


@many()
@given(data=st.data())
def test_whatever_a_peer_says_is_survived_and_forgotten(data: st.DataObject) -> None:
    network = quiet()
    transfer, prepare = between(network)
    pulls: dict[str, set[Transfer]] = {"a": set(), "b": set()}
    for _ in range(data.draw(st.integers(1, 6))):
        message = data.draw(changed(transfer, prepare))
        speaker, hearer = data.draw(st.sampled_from([("a", "b"), ("b", "a")]))
        act(network.instances[hearer], Heard(speaker, message), pulls[hearer])
    for name, pulled in pulls.items():
        instance = network.instances[name]
        for one in sorted(pulled):
            act(instance, PullEnded(one, data.draw(st.sampled_from(["", "cut"]))), pulled)
        act(instance, Ticked(HORIZON_TICKS), pulled)
        assert len(instance.sending) == 0 and not len(instance.receiving)


@pytest.mark.parametrize("ticks", [0, -1, -(1 << 62)])
def test_a_text_whose_time_is_over_is_not_held(ticks: int) -> None:
    network = quiet()
    _, prepare = between(network)
    agent = network.instances["b"].agent
    [action] = agent.handle(Heard("a", msgspec.structs.replace(prepare, ticks_left=ticks)))
    assert isinstance(action, Send) and isinstance(action.message, Abandon)
    assert len(agent.receiving) == 0


def test_a_text_is_not_held_for_ever() -> None:
    network = quiet()
    _, prepare = between(network)
    agent = network.instances["b"].agent
    agent.handle(Heard("a", msgspec.structs.replace(prepare, ticks_left=1 << 62)))
    assert len(agent.receiving) == 1
    agent.handle(Ticked(HORIZON_TICKS))
    assert len(agent.receiving) == 0


@pytest.mark.parametrize(
    "missing",
    [b"\0\0\0", b"\0\0\0\0", b"\xff" * 8, np.array([9, 0], "<i4").tobytes(), bytes(8 * 4096)],
)
def test_pages_that_cannot_be_missing_end_the_transfer(missing: bytes) -> None:
    network = quiet()
    transfer, _ = between(network)
    agent = network.instances["a"].agent
    told = agent.handle(Heard("b", Prepared(transfer, missing)))
    [abandoned] = [one.message for one in told if isinstance(one, Send)]
    assert isinstance(abandoned, Abandon) and transfer not in agent.sending

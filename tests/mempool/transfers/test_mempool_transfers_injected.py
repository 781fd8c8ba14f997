"""What a peer of the cluster says is checked: no field raises, and nothing is held for ever."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.entries import Heard, PeerEntry, PullEnded, Ticked
from kvell.mempool.transfers.actions import Ended, Pull, Send, StopPull
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
from tests.depth import many
from tests.mempool.transfers.network import Instance, Network
from tests.mempool.transfers.runs import quiet

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

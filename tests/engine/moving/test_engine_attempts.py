"""Of two attempts of a request at one instance the later one goes on, however they come."""

import numpy as np
import pytest

from kvell.engine.protocol.messages import Cancel, Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.mempool.entries import PeerLost
from kvell.vocabulary import RequestId
from tests.engine.moving.handing_over import Cluster, Entry
from tests.engine.moving.test_engine_handovers import NAMES, cluster_of, prompt_of
from tests.engine.virtual_model import expected_output

NAME = "r"


def until_it_is_pulled(cluster: Cluster, target: str) -> None:
    """All but the end of the copy, of which the target has not heard yet."""
    for _ in range(100):
        while cluster.messages:
            cluster.deliver(0)
        if cluster.instances[target].copying:
            return
        for name in NAMES:
            cluster.step(name)
    raise AssertionError("it was not offered")


@pytest.mark.parametrize("salt", ["", "s"])
def test_a_request_that_came_after_its_cancel_makes_way(salt: str) -> None:
    """Its sender dies when all is copied, and the front gives it to its receiver as a new one."""
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 20), 9, salt)
    cluster.submit(NAME, entry, "p", "d")
    until_it_is_pulled(cluster, "d")
    receiver = cluster.instances["d"]
    cluster.hear(receiver, receiver.engine.tell(Cancel(RequestId(NAME), entry.attempt)))
    cluster.copy("d", 0, 99)
    died = cluster.instances["p"].incarnation
    cluster.start("p")
    entry.attempt += 1
    cluster.submit(NAME, entry, "d", "")
    cluster.hear(receiver, receiver.engine.on_entry(PeerLost("p", died)))
    cluster.settle()
    assert entry.end is not None and entry.end.reason == "length"
    assert entry.emitted == expected_output(entry.prompt, 9)
    cluster.check_ends()


def test_the_end_of_the_earlier_attempt_is_not_told() -> None:
    """Whoever counts requests by their id would take it for the end of the later one."""
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 20), 9, "")
    cluster.submit(NAME, entry, "d", "")
    cluster.step("d")
    receiver, entry.attempt = cluster.instances["d"], 1
    prompt = np.asarray(entry.prompt, "<i4").tobytes()
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    command = Submit(RequestSpec(RequestId(NAME), prompt, sampling), attempt=1)
    assert not any(isinstance(event, Finished) for event in receiver.engine.tell(command))
    cluster.settle()
    assert entry.emitted == expected_output(entry.prompt, 9)
    cluster.check_ends()


@pytest.mark.parametrize("attempt", [-1, 0])
@pytest.mark.parametrize("moment", range(8))
def test_a_cancelled_request_does_not_begin_where_it_goes(moment: int, attempt: int) -> None:
    """Its sender is stopped and says nothing; its receiver is told, at any moment before it."""
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 20), 9, "")
    cluster.submit(NAME, entry, "p", "d")
    receiver = cluster.instances["d"]
    for _ in range(moment):
        if cluster.messages:
            cluster.deliver(0)
        else:
            cluster.step("p")
    comes = len(receiver.core.handovers.agent.receiving) > 0  # type: ignore[union-attr]
    cluster.hear(receiver, receiver.engine.tell(Cancel(RequestId(NAME), attempt)))
    cluster.copy("d", 0, 99)
    assert receiver.core.num_running() == 0 and not receiver.core.has_work
    if comes:
        cluster.settle()
        assert cluster.moved == 0, "it stays where its sender is"
        assert entry.emitted == expected_output(entry.prompt, 9)
        cluster.check_ends()


def test_a_cancel_of_the_attempt_before_means_no_later_one() -> None:
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 20), 9, "", attempt=1)
    cluster.submit(NAME, entry, "p", "d")
    until_it_is_pulled(cluster, "d")
    receiver = cluster.instances["d"]
    cluster.hear(receiver, receiver.engine.tell(Cancel(RequestId(NAME), 0)))
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 1


def test_an_attempt_with_the_same_number_is_refused() -> None:
    cluster = cluster_of()
    cluster.submit(NAME, Entry(prompt_of(1, 20), 9, ""), "d", "")
    again = Entry(prompt_of(1, 20), 9, "")
    cluster.submit(NAME, again, "d", "")
    assert again.end is not None and again.end.field == "request_id"

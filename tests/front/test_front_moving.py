"""Requests whose prompt one instance computes and another goes on with, as the front sees them."""

import numpy as np
import pytest
from msgspec import structs

from kvell.cluster.routed_request import InstanceDeath
from kvell.cluster.routing.policies import router_named
from kvell.engine.protocol.messages import (
    Cancel,
    Finished,
    Heartbeat,
    Migrate,
    MigrationRefused,
    MoveKvCache,
    Tokens,
)
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.front.routes import RequestTransfer, TransferTotals, totals_by_target
from kvell.vocabulary import RequestId
from tests.reports import facts, load

KILLED = InstanceDeath("the instance died", "killed")
PREFILL, DECODE = "prefill-0", "decode-0"


def opened(*names: str) -> RequestQueue:
    queue = RequestQueue(8)
    for number, name in enumerate(names):
        queue.line(name).open(facts(4, 100 + number))
    return queue


LENDS = facts(
    pool_bytes=9000,
    token_bytes=1,
    max_model_len=9000,
    reach_tokens=9000,
    section_bytes=512,
)


def entry(name: str = "a") -> LogEntry:
    prompt = np.arange(9, dtype="<i4").tobytes()
    return LogEntry(RequestSpec(RequestId(name), prompt, SamplingParams(max_tokens=20)), 0.0)


def submitted(queue: RequestQueue, request: LogEntry) -> tuple[str, str]:
    queue.add(request)
    ((instance, command),) = queue.due(0.0)
    return instance, command.goes_to


def moved(request: LogEntry, size_bytes: int = 0) -> Finished:
    return Finished(request.request_id, request.attempt, "moved", moved_bytes=size_bytes)


def test_a_prompt_goes_to_one_and_its_request_on_to_the_other() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    assert submitted(queue, request) == (PREFILL, DECODE)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    queue.on_finished(moved(request, 70), 1.0)
    prefill, decode = queue.line(PREFILL), queue.line(DECODE)
    assert not prefill.in_flight and list(decode.in_flight) == [request.request_id]
    assert (prefill.outstanding_prompt_tokens, decode.outstanding_prompt_tokens) == (0, 0)
    assert decode.outstanding_output_tokens == 19
    queue.tokens(Tokens(request.request_id, 0, 1, (8, 9)), 2.0)
    queue.on_finished(Finished(request.request_id, 0, "length"), 3.0)
    assert not decode.in_flight and queue.in_flight == 0
    assert list(request.output) == [7, 8, 9]
    handover = RequestTransfer("handover", PREFILL, DECODE)
    assert queue.entries().transfers == {handover: TransferTotals(1, 70)}


def test_counts_of_transfers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of each instance that is left never fall, since metrics are made of them."""
    monkeypatch.setattr("kvell.front.routes.MOST_COUNTED", 2)
    queue = opened(PREFILL, DECODE)
    for number in range(2):
        queue._routes.transfers |= {
            RequestTransfer("move", f"gone-{number}", DECODE): TransferTotals(1, 5),
            RequestTransfer("pull", DECODE, f"gone-{number}"): TransferTotals(1, 9),
        }
    request = entry()
    submitted(queue, request)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    queue.on_finished(moved(request), 1.0)
    transfers = queue.entries().transfers
    assert transfers == {
        RequestTransfer("move", "", DECODE): TransferTotals(2, 10),
        RequestTransfer("handover", PREFILL, DECODE): TransferTotals(1, 0),
    }
    assert totals_by_target(transfers) == {
        DECODE: {"move": TransferTotals(2, 10), "handover": TransferTotals(1, 0)}
    }


def test_tokens_may_come_from_the_other_before_the_first_says_that_it_moved() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    queue.tokens(Tokens(request.request_id, 0, 1, (8,)), 1.0)
    queue.on_finished(moved(request), 1.0)
    assert list(request.output) == [7, 8]
    assert list(queue.line(DECODE).in_flight) == [request.request_id]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((PREFILL,), (PREFILL, "")),
        ((DECODE,), (DECODE, "")),
        (("mixed-0", DECODE), ("mixed-0", "")),
        ((DECODE, PREFILL), (PREFILL, DECODE)),
    ],
)
def test_who_is_left_does_the_whole_work(names: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert submitted(opened(*names), entry()) == expected


def test_a_prompt_waits_for_an_instance_of_its_role() -> None:
    """While one computes prompts, those that decode get none."""
    queue = opened(PREFILL, DECODE)
    for number in range(4):
        submitted(queue, entry(f"r{number}"))
    queue.add(entry("last"))
    assert queue.due(0.0) == []


def test_both_hear_of_a_cancel() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    cancel = Cancel(request.request_id, 0)
    assert queue.drop(request.request_id, "cancelled", 1.0) == [(PREFILL, cancel), (DECODE, cancel)]
    queue.on_finished(Finished(request.request_id, 0, "cancelled"), 1.0)
    assert queue.in_flight == 0


def test_the_death_of_the_first_starts_a_new_attempt_and_ends_the_old_at_the_other() -> None:
    queue, request = opened(PREFILL, "prefill-1", DECODE), entry()
    instance, _ = submitted(queue, request)
    told = queue.lost(instance, KILLED, 1.0)
    assert told == [(DECODE, Cancel(request.request_id, 0))]
    queue.line(instance).close()
    ((other, command),) = queue.due(1.0)
    assert other != instance and (command.attempt, command.goes_to) == (1, DECODE)
    queue.on_finished(Finished(request.request_id, 0, "moved"), 1.0)  # of the old attempt
    assert list(queue.line(other).in_flight) == [request.request_id]


@pytest.mark.parametrize("restarts", [True, False])
def test_the_death_of_the_other_after_it_took_the_request_starts_a_new_attempt(
    restarts: bool,
) -> None:
    """It died before the first said that the request had moved."""
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    assert queue.lost(DECODE, KILLED, 1.0) == []
    queue.line(DECODE).close()
    if restarts:
        queue.line(DECODE).open(facts(4, 999))
    queue.on_finished(moved(request), 1.0)
    assert not queue.line(PREFILL).in_flight
    ((instance, command),) = queue.due(1.0)
    assert (instance, command.attempt) == (PREFILL, 1)
    assert np.frombuffer(command.output, "<i4").tolist() == [7]


def test_the_death_of_the_other_starts_a_new_attempt_of_what_it_had() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    queue.on_finished(moved(request), 1.0)
    assert queue.lost(DECODE, KILLED, 2.0) == []
    queue.line(DECODE).close()
    ((instance, command),) = queue.due(2.0)
    assert (instance, command.attempt, command.goes_to) == (PREFILL, 1, "")


def test_a_request_whose_session_was_elsewhere_pulls_from_there() -> None:
    queue = RequestQueue(8, router=router_named("round-robin"))
    for number, name in enumerate(("mixed-0", "mixed-1")):
        queue.line(name).open(facts(4, 100 + number))
    asked = []
    for number in range(3):
        prompt = np.arange(90, dtype="<i4").tobytes()
        name = RequestId(f"r{number}")
        queue.add(LogEntry(RequestSpec(name, prompt, SamplingParams(), session="s"), 0.0))
        ((instance, command),) = queue.due(0.0)
        asked.append((instance, command.pulls_from))
        queue.on_finished(Finished(name, 0, "length", pulled_bytes=8 * number), 1.0)
    assert asked == [("mixed-0", ""), ("mixed-1", "mixed-0"), ("mixed-0", "")]
    pull = RequestTransfer("pull", "mixed-0", "mixed-1")
    assert queue.entries().transfers == {pull: TransferTotals(1, 8)}


def test_a_pull_that_copied_no_page_is_not_counted() -> None:
    queue = RequestQueue(8, router=router_named("round-robin"))
    for number, name in enumerate(("mixed-0", "mixed-1")):
        queue.line(name).open(facts(4, 100 + number))
    for number in range(2):
        prompt = np.arange(90, dtype="<i4").tobytes()
        name = RequestId(f"r{number}")
        queue.add(LogEntry(RequestSpec(name, prompt, SamplingParams(), session="s"), 0.0))
        ((_, command),) = queue.due(0.0)
        queue.on_finished(Finished(name, 0, "length"), 1.0)
    assert command.pulls_from == "mixed-0" and queue.entries().transfers == {}


MIXED = ("mixed-0", "mixed-1", "mixed-2")


def serving(count: int, *names: str) -> tuple[RequestQueue, list[LogEntry]]:
    """Requests that the first instance has, and that have a token each."""
    queue = opened(names[0])
    entries = [entry(f"r{number}") for number in range(count)]
    for request in entries:
        submitted(queue, request)
        queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    for number, name in enumerate(names[1:], 1):
        queue.line(name).open(facts(4, 100 + number))
    return queue, entries


def beat(free_bytes: int, waiting: int = 0) -> Heartbeat:
    return Heartbeat(load(free_bytes, 1000, waiting, running=1))


def test_a_request_goes_on_where_it_was_sent() -> None:
    queue, [request] = serving(1, *MIXED[:2])
    command = Migrate(request.request_id, 0, "mixed-1")
    assert queue.migrate(request.request_id, "mixed-1") == [("mixed-0", command)]
    assert queue.migrate(request.request_id, "mixed-1") == []  # it is on its way
    queue.tokens(Tokens(request.request_id, 0, 1, (8,)), 2.0)
    queue.on_finished(moved(request, 90), 2.0)
    assert list(queue.line("mixed-1").in_flight) == [request.request_id]
    assert not queue.line("mixed-0").in_flight and request.attempt == 0
    move = RequestTransfer("move", "mixed-0", "mixed-1")
    assert queue.entries().transfers == {move: TransferTotals(1, 90)}
    assert not queue.line("mixed-1").coming


@pytest.mark.parametrize("ends", ["stays", "dies", "finished", "cancelled"])
def test_one_that_does_not_arrive_leaves_nothing_behind(ends: str) -> None:
    queue, [request] = serving(1, *MIXED[:2])
    queue.migrate(request.request_id, "mixed-1")
    assert [*queue.line("mixed-1").coming] == [request.request_id]
    if ends == "stays":
        queue.on_notice(MigrationRefused(request.request_id, 1))  # another attempt's
        assert request.goes_to == "mixed-1"
        queue.on_notice(MigrationRefused(request.request_id, 0))
    elif ends == "dies":
        queue.lost("mixed-1", KILLED, 2.0)
    elif ends == "finished":
        queue.on_finished(Finished(request.request_id, 0, "length"), 2.0)
    else:
        told = queue.drop(request.request_id, "cancelled", 2.0)
        assert [one for one, _ in told] == ["mixed-0", "mixed-1"]
        queue.on_finished(Finished(request.request_id, 0, "cancelled"), 2.0)
    assert request.goes_to == "" and not queue.line("mixed-1").coming
    assert queue.in_flight == (1 if ends in ("stays", "dies") else 0)


def test_what_cannot_be_sent_elsewhere_is_named() -> None:
    queue, [request] = serving(1, *MIXED[:2])
    with pytest.raises(ChangeSomething, match="request_id=nobody: is not served now"):
        queue.migrate(RequestId("nobody"), "mixed-1")
    queue.line("mixed-1").close()
    for name in ("mixed-0", "mixed-1", "mixed-7"):
        with pytest.raises(ChangeSomething, match=f"instance_id={name}"):
            queue.migrate(request.request_id, name)


def test_an_instance_that_leaves_gives_its_requests_to_all_others() -> None:
    queue, entries = serving(4, *MIXED)
    queue.drop(entries[3].request_id, "cancelled", 1.0)
    queue.line("mixed-0").close()
    told = queue.evacuate("mixed-0")
    assert [(one, command.request_id) for one, command in told] == [
        ("mixed-0", request.request_id) for request in entries[:3]
    ]
    assert {command.goes_to for _, command in told} == {"mixed-1", "mixed-2"}
    assert queue.evacuate("mixed-0") == []


def test_nothing_leaves_where_nobody_else_is() -> None:
    queue, _ = serving(2, "decode-0", "prefill-0")
    assert queue.evacuate("decode-0") == []


def test_memory_that_runs_short_sends_the_youngest_away_one_at_a_time() -> None:
    queue, entries = serving(3, *MIXED[:2])
    assert queue.on_event("mixed-1", beat(900), 1.0) == []
    assert queue.on_event("mixed-0", beat(500), 2.0) == []
    command = Migrate(entries[2].request_id, 0, "mixed-1")
    assert queue.on_event("mixed-0", beat(100), 3.0) == [("mixed-0", command)]
    queue.on_notice(MigrationRefused(entries[2].request_id, 0))
    assert queue.on_event("mixed-0", beat(100), 3.9) == [], "it is decided once a second"
    assert queue.on_event("mixed-0", beat(100), 4.0) == [("mixed-0", command)]
    assert queue.on_event("mixed-0", beat(100), 5.0) == []
    assert queue.on_event("mixed-1", beat(900), 5.5) == []
    queue.on_notice(MigrationRefused(entries[2].request_id, 0))
    queue.line("mixed-1").on_heartbeat(beat(900, waiting=1))
    assert queue.on_event("mixed-0", beat(100), 6.0) == []


def test_a_request_that_reached_an_instance_that_drains_goes_on_from_there() -> None:
    """It is not tried anew beside what is computed there, and leaves like all others there."""
    queue, request = opened(PREFILL, DECODE, "decode-1"), entry()
    _, target = submitted(queue, request)
    other = next(one for one in (DECODE, "decode-1") if one != target)
    queue.line(target).close()
    assert queue.evacuate(target) == []
    told = queue.on_event(PREFILL, moved(request), 1.0)
    assert list(queue.line(target).in_flight) == [request.request_id]
    assert told == [(target, Migrate(request.request_id, 0, other))]
    queue.on_finished(Finished(request.request_id, 0, "moved"), 2.0)
    assert request.attempt == 0 and list(queue.line(other).in_flight) == [request.request_id]


def test_the_longest_request_of_an_instance_without_memory_lies_elsewhere_in_part() -> None:
    """The front that decides by itself tells the instance that has it, once in a second."""
    queue, request = RequestQueue(8, steers=True), entry()
    for number, name in enumerate(("mixed-0", "mixed-1")):
        own = structs.replace(LENDS, incarnation=100 + number)
        queue.line(name).open(own)
    instance, _ = submitted(queue, request)
    queue.tokens(Tokens(request.request_id, 0, 0, tuple(range(2000))), 1.0)
    other = {"mixed-0": "mixed-1", "mixed-1": "mixed-0"}[instance]
    idle = Heartbeat(load(9000, 9000))
    long = RequestPlacementEntry(request.request_id, instance, 3, local=True)
    short = Heartbeat(
        load(
            *(900, 9000, 1),
            running=1,
            held_tokens=2000,
            waiting_tokens=700,
            head_tokens=700,
            head_bytes=700,
            longest=(long,),
        )
    )
    assert queue.on_event(instance, short, 1.0) == [], "the other has said nothing yet"
    assert queue.on_event(other, idle, 1.5) == []
    told = queue.on_event(instance, short, 2.0)
    assert told == [(instance, MoveKvCache(request.request_id, 0, 2, other))]
    assert queue.on_event(instance, short, 3.5) == [], "the other has said nothing since"
    assert not queue.line(other).coming and not request.goes_to, "it stays where it is"


def test_what_is_lent_is_a_running_request_and_lies_at_another_instance() -> None:
    queue, request = opened("mixed-0", "mixed-1"), entry()
    assert queue.move("a", "mixed-1", 2) == []
    at, _ = submitted(queue, request)
    assert queue.move("a", at, 2) == [] and queue.move("a", "mixed-9", 2) == []
    other = {"mixed-0": "mixed-1", "mixed-1": "mixed-0"}[at]
    assert queue.move("a", other, 2) == [(at, MoveKvCache(request.request_id, 0, 2, other))]
    queue.move("a", other)
    assert queue.move("a", other, 2) == [], "it goes there as a whole"

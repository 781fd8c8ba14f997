"""A front's requests that are longer than the memory of one instance."""

import asyncio

import pytest
from msgspec import structs

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.routed_request import InstanceDeath
from kvell.cost.prices import ExecCosts
from kvell.engine.protocol.messages import Cancel, Finished, Heartbeat, OtherFronts, Submit
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceFacts, ModelLengths
from kvell.errors import ChangeSomething
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import RequestId
from tests.engine.works import with_spec
from tests.front.scenarios import entry
from tests.reports import facts, load

SECTION = 8
ALONE = 40
"""Tokens that an instance holds; each takes one byte."""
LENDS = facts(
    pool_bytes=ALONE,
    token_bytes=1,
    max_model_len=ALONE,
    reach_tokens=200,
    section_bytes=SECTION,
    section_tokens=SECTION,
)
ALONE_ONLY = facts(pool_bytes=ALONE, token_bytes=1, max_model_len=ALONE)
NAMES = ("mixed-0", "mixed-1", "mixed-2")


def opened(*names: str, limits: InstanceFacts = LENDS, credits: int = 4) -> RequestQueue:  # noqa: A002
    queue = RequestQueue(8, steers=False)
    for number, name in enumerate(names):
        queue.line(name).open(structs.replace(limits, credits=credits, incarnation=100 + number))
    return queue


def due_with(queue: RequestQueue, request: LogEntry) -> list[tuple[str, Submit]]:
    queue.add(request)
    return queue.due(0.0)


def submitted(queue: RequestQueue, request: LogEntry) -> tuple[str, Submit]:
    queue.add(request)
    ((instance, command),) = queue.due(0.0)
    return instance, command


def beat(free: int, placements: tuple[RequestPlacementEntry, ...] = ()) -> Heartbeat:
    return Heartbeat(load(free, ALONE, placements=placements))


def parts(command: Submit) -> dict[str, int]:
    return {one.inst_id: one.num_blocks for one in command.placement}


def test_a_long_request_comes_with_its_placement() -> None:
    queue = opened(*NAMES)
    at, command = submitted(queue, entry(70, 10))
    assert parts(command)[at] == 5
    assert sorted(count for name, count in parts(command).items() if name != at) == [2, 3]
    (local,) = (one for one in command.placement if one.local)
    assert local.inst_id == at and local.req_id == "long"


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "is_long"),
    [(36, 4, False), (36, 5, True), (39, None, False), (40, None, True), (8, 90, True)],
)
def test_long_is_what_may_outgrow_one_instance(
    tokens: int, max_tokens: int | None, is_long: bool
) -> None:
    queue = opened(*NAMES)
    _, command = submitted(queue, entry(tokens, max_tokens))
    assert bool(command.placement) == is_long


def to_second(request: LogEntry) -> LogEntry:
    return with_spec(request, model="second")


def test_a_long_request_to_another_model_is_placed_by_its_own_lengths() -> None:
    lengths = ModelLengths(3 * SECTION, 80)
    queue = opened(*NAMES, limits=structs.replace(LENDS, beside={"second": lengths}))
    assert queue.placements.reach_tokens("second") == 80 < queue.placements.reach_tokens()
    at, command = submitted(queue, to_second(entry(30, 4)))
    assert parts(command)[at] == 3 and sum(parts(command).values()) == 5
    assert submitted(queue, entry(30, 4, "first"))[1].placement == ()
    with pytest.raises(ChangeSomething, match="exceeds the 80 tokens"):
        queue.add(to_second(entry(81, 1, "longer")))


@pytest.mark.parametrize("name", ["unserved", "short"])
def test_a_model_that_borrows_nothing_gets_no_placement(name: str) -> None:
    queue = opened(*NAMES, limits=structs.replace(LENDS, beside={"short": ModelLengths(20)}))
    _, command = submitted(queue, with_spec(entry(90, 4), model=name))
    assert command.placement == ()


def test_where_nobody_lends_nothing_is_placed() -> None:
    """One instance, or several that do not: the instance says what it cannot serve."""
    for queue in (opened("mixed-0"), opened(*NAMES, limits=ALONE_ONLY)):
        _, command = submitted(queue, entry(90))
        assert command.placement == ()


def test_beyond_what_all_hold_something_must_change() -> None:
    queue = opened(*NAMES)
    reach = queue.placements.reach_tokens()
    assert reach == (5 + 4 + 4) * SECTION
    assert submitted(opened(*NAMES), entry(reach - 1, 1))[1].placement
    with pytest.raises(ChangeSomething, match=f"prompt.*exceeds the {reach} tokens"):
        queue.add(entry(reach, 1))


def test_an_answer_beyond_what_all_hold_names_its_field() -> None:
    queue = opened(*NAMES)
    reach = queue.placements.reach_tokens()
    queue.add(entry(30, reach - 30))
    with pytest.raises(ChangeSomething, match=f"max_tokens=75: .* {reach} tokens .* at most 74"):
        queue.add(entry(30, reach - 29, "longer"))


def taken(request: LogEntry) -> Finished:
    async def take() -> Finished:
        async with asyncio.timeout(1):
            end = (await request.mailbox.take()).finished
        assert end is not None
        return end

    return asyncio.run(take())


@pytest.mark.parametrize("goes", ["leaves", "given up"])
def test_a_waiting_request_that_those_left_cannot_hold_is_refused(goes: str) -> None:
    """Others still wait, and one instance that restarts is waited for."""
    queue = opened(*NAMES)
    for name in NAMES:
        queue.on_event(name, beat(10), 0.0)
    longest, answers, shorter = entry(90), entry(30, 60, "answers"), entry(60, 4, "shorter")
    for request in (longest, answers, shorter):
        assert due_with(queue, request) == []
    queue.lost("mixed-2", InstanceDeath("it died", "killed"), 1.0)
    assert (queue.waiting, queue.placements.reach_tokens()) == (3, (5 + 4 + 4) * SECTION)
    if goes == "leaves":
        queue.leaving("mixed-2", 2.0)
    else:
        queue.on_given_up("mixed-2", 2.0)
    reach = queue.placements.reach_tokens()
    assert (queue.waiting, reach) == (1, (5 + 4) * SECTION)
    refused = [taken(request) for request in (longest, answers)]
    assert [end.field for end in refused] == ["prompt", "max_tokens"]
    assert all(end.reason == "refused" and f"{reach} tokens" in end.message for end in refused)
    with pytest.raises(ChangeSomething, match=f"exceeds the {reach} tokens"):
        queue.add(entry(90, name="later"))
    queue.open("mixed-2", LENDS, joins_others=True)
    assert queue.placements.reach_tokens() == (5 + 4 + 4) * SECTION
    queue.add(entry(90, name="later"))


@pytest.mark.parametrize("dies", [False, True])
def test_a_placed_request_that_those_left_cannot_hold_is_refused_once_the_lender_is_gone(
    dies: bool,
) -> None:
    """While it drains the request may end; one that has fewer tokens goes on."""
    queue = opened(*NAMES)
    longest, stopped, answers = entry(90), entry(89, name="stopped"), entry(30, 60, "answers")
    for request in (longest, stopped, answers):
        queue.on_event("mixed-1", beat(ALONE), 0.0)
        queue.on_event("mixed-2", beat(ALONE), 0.0)
        for line in queue.lines.values():
            line.placements = ()
        queue.placements._placed.clear()
        ((home, _),) = due_with(queue, request)
        assert home == "mixed-0"
    queue.drop(stopped.request_id, "stop", 0.5)
    assert not [each for each in queue.leaving("mixed-2", 1.0) if isinstance(each[1], Cancel)]
    cancels = queue.on_given_up("mixed-2", 2.0)
    assert cancels == [("mixed-0", Cancel(longest.request_id, 0))]
    reach = queue.placements.reach_tokens()
    if dies:
        queue.lost("mixed-0", InstanceDeath("it died", "killed"), 3.0)
    else:
        queue.on_events("mixed-0", [Finished(longest.request_id, 0, "cancelled")], 3.0)
        queue.on_events("mixed-0", [Finished(stopped.request_id, 0, "cancelled")], 3.0)
    end = taken(longest)
    assert (end.reason, end.field) == ("refused", "prompt") and f"{reach} tokens" in end.message
    assert taken(stopped).reason == "stop"
    assert answers.request_id in {each.request_id for each in queue.entries().in_flight} or dies


def test_beside_one_that_leaves_a_request_is_as_if_alone() -> None:
    queue = opened("mixed-0", "mixed-1")
    for name in ("mixed-0", "mixed-1"):
        queue.on_event(name, beat(10), 0.0)
    assert due_with(queue, entry(60)) == []
    queue.leaving("mixed-1", 1.0)
    ((at, command),) = queue.on_events("mixed-0", [beat(10)], 1.0)
    assert isinstance(command, Submit)
    assert (at, command.placement) == ("mixed-0", ()), "its instance names what must change"


def test_an_instance_that_was_never_ready_does_not_hide_the_lengths_of_others() -> None:
    queue = RequestQueue(8, steers=False)
    queue.line("mixed-9")  # it is still being started
    for number, name in enumerate(NAMES):
        queue.line(name).open(structs.replace(LENDS, credits=4, incarnation=100 + number))
    assert submitted(queue, entry(70, 10))[1].placement


def test_a_prefill_instance_is_no_home_of_a_long_request() -> None:
    """The only one that decodes was given up: the request cannot be placed."""
    queue = opened("prefill-0", "prefill-1", "decode-0")
    assert submitted(queue, entry(60))[0] == "decode-0"
    queue.on_given_up("decode-0", 1.0)
    assert queue.placements.reach_tokens() == ALONE
    with pytest.raises(ChangeSomething, match=f"exceeds the {ALONE} tokens"):
        queue.add(entry(60, name="later"))


def test_all_sections_of_a_request_are_read_in_one_way() -> None:
    """Two hosts: the memory of both together is too little if one way alone does not reach."""
    queue = RequestQueue(8, steers=False)
    for number, name in enumerate(("a0", "a1", "b0", "b1", "b2")):
        its = structs.replace(LENDS, host=name[0], is_asked=True, incarnation=number)
        queue.line(name).open(structs.replace(its, credits=4))
    assert queue.placements.reach_tokens() == (5 + 3 * 4) * SECTION
    at, near = submitted(queue, entry(60, 4))
    assert {name[0] for name in parts(near)} == {at[0]}, "in place first"
    queue.on_finished(Finished(RequestId("long"), 0, "length"), 1.0)
    at, far = submitted(queue, entry(130, 4))
    assert at[0] == "a" and {name[0] for name in parts(far) if name != at} == {"b"}


def test_within_reach_and_nobody_to_lend_waits_and_holds_up_nobody() -> None:
    queue = opened(*NAMES)
    for name in NAMES:
        queue.on_event(name, beat(10), 0.0)
    queue.add(entry(90))
    assert queue.due(0.0) == [] and queue.waiting == 1
    queue.add(entry(85, name="later"))
    assert queue.due(0.0) == []
    _, command = submitted(queue, entry(4, name="short"))
    assert command.request_id == "short"
    for name in NAMES:
        queue.on_event(name, beat(ALONE), 1.0)
    ((_, command),) = queue.due(1.0)
    assert command.request_id == "long", "in turn, though the later one needs less"


@pytest.mark.parametrize("names", [("prefill-0", *NAMES), ("prefill-0", "decode-0", "decode-1")])
def test_prompts_that_others_compute_are_no_matter_to_a_long_one(names: tuple[str, ...]) -> None:
    """It is computed where it is decoded; those for prompts alone lend."""
    queue = opened(*names)
    at, command = submitted(queue, entry(90, 10))
    assert at != "prefill-0" and command.goes_to == ""
    assert parts(command)["prefill-0"] > 0


def test_who_waits_beside_idle_instances_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    queue = opened(*NAMES)
    for name in NAMES:  # what is held there nobody gives back
        queue.on_event(name, beat(8), 0.0)
    queue.add(entry(90, name="long"))
    for now in (0.0, 5.0, 9.0):
        assert queue.due(now) == []
        queue.on_event("mixed-0", beat(8), now)
    assert queue.entries().idle_wait is None and not caplog.records
    queue.on_event("mixed-1", Heartbeat(beat(8).load, OtherFronts(0, 1)), 9.0)
    queue.on_event("mixed-0", beat(8), 10.0)
    assert queue.entries().idle_wait is None, "another front has a request there"
    queue.on_event("mixed-1", beat(8), 0.0)
    for now in (10.0, 11.0):
        queue.on_event("mixed-0", beat(8), now)
    why = "one with a prompt of 90 tokens is longer than one instance's memory, and no other lends"
    assert [record.getMessage() for record in caplog.records] == [
        f"1 requests are waiting although every instance is idle: {why} what it needs"
    ]
    wait = queue.entries().idle_wait
    assert wait is not None and (wait.requests, wait.seconds) == (1, 11.0)
    for name in NAMES:
        queue.on_event(name, beat(ALONE), 12.0)
    assert len(queue.due(12.0)) == 1
    queue.on_event("mixed-0", beat(ALONE), 13.0)
    assert queue.entries().idle_wait is None


def test_what_gave_way_goes_behind_the_debtor_that_goes_on() -> None:
    """Another front placed its request at the same time, at another home."""
    queue = opened(*NAMES)
    home, command = submitted(queue, entry(90))
    assert home == "mixed-0"
    other = (
        RequestPlacementEntry(RequestId("other"), "mixed-1", 5, local=True),
        RequestPlacementEntry(RequestId("other"), "mixed-2", 5, local=False),
    )
    refusal = Finished(
        command.request_id, command.attempt, "refused", try_later=True, not_taken="rival"
    )
    assert queue.on_event(home, refusal, 1.0) == []
    beats = {"mixed-0": beat(ALONE), "mixed-1": beat(0, other), "mixed-2": beat(0)}
    for name, said in beats.items():
        queue.on_event(name, said, 1.0)
    assert (queue.waiting, queue.due(1.0)) == (1, [])
    for name in NAMES:
        queue.on_event(name, beat(ALONE), 2.0)
    ((_, again),) = queue.due(2.0)
    assert (again.request_id, again.attempt) == ("long", command.attempt + 1)


def test_those_that_are_longer_wait_in_turn_by_tenant() -> None:
    queue = opened(*NAMES)
    for name in NAMES:
        queue.on_event(name, beat(10), 0.0)
    for n in range(3):
        queue.add(with_spec(entry(90, name=f"a{n}"), tenant="a"))
    queue.due(0.0)
    queue.add(with_spec(entry(90, name="b"), tenant="b"))
    queue.due(0.0)
    order = []
    for step in range(1, 5):
        for name in NAMES:
            queue.on_event(name, beat(ALONE), float(step))
        ((at, command),) = queue.due(float(step))
        order.append(str(command.request_id))
        queue.on_event(at, Finished(command.request_id, command.attempt, "length"), step + 0.5)
    assert order == ["a0", "b", "a1", "a2"]


def test_one_that_found_memory_at_once_is_charged_among_its_kind() -> None:
    queue = opened(*NAMES)
    order = []
    for tenant, name in (("a", "a0"), ("a", "a1"), ("a", "a2"), ("b", "b")):
        queue.add(with_spec(entry(90, name=name), tenant=tenant))
        order += [(at, command) for at, command in queue.due(0.0)]
    assert [str(command.request_id) for _, command in order] == ["a0"]
    for step in range(1, 4):
        at, command = order[-1]
        queue.on_event(at, Finished(command.request_id, command.attempt, "length"), float(step))
        order += queue.due(float(step))
    assert [str(command.request_id) for _, command in order] == ["a0", "b", "a1", "a2"]


def test_longer_requests_of_a_tenant_leave_credits_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = opened(*NAMES)
    for name in NAMES:
        queue.on_event(name, beat(10), 0.0)
    for name in ("a0", "b"):
        queue.add(with_spec(entry(90, name=name), tenant=name[0]))
    assert queue.due(0.0) == []
    monkeypatch.setattr(InstanceLoad, "has_room_for", lambda _line, tenant: tenant != "a")
    for name in NAMES:
        queue.on_event(name, beat(ALONE), 1.0)
    assert [str(command.request_id) for _, command in queue.due(1.0)] == ["b"]


def test_what_a_request_held_is_free_again_when_it_ends() -> None:
    """Not only with the next heartbeats, which come later."""
    queue = opened(*NAMES)
    at, first = submitted(queue, entry(90, 4))
    queue.on_event(at, beat(0, first.placement), 1.0)
    for name, blocks in parts(first).items():
        if name != at:
            queue.on_event(name, beat(ALONE - blocks * SECTION), 1.0)
    second = entry(90, 4, "second")
    second.spec = structs.replace(second.spec, prompt=second.spec.prompt[::-1])
    queue.add(second)
    assert queue.due(1.0) == []
    queue.on_event(at, Finished(RequestId("long"), 0, "length"), 2.0)
    ((_, command),) = queue.due(2.0)
    assert command.request_id == "second" and command.placement


def test_one_dropped_while_it_waits_for_memory_is_gone() -> None:
    queue = opened(*NAMES)
    for name in NAMES:
        queue.on_event(name, beat(10), 0.0)
    queue.add(entry(90))
    queue.due(0.0)
    assert queue.drop(RequestId("long"), "cancelled", 1.0) == []
    assert queue.waiting == 0 and not queue.awaits_memory


def test_a_second_long_request_goes_to_the_debtor() -> None:
    """Nobody lends and borrows at once."""
    queue = opened(*NAMES)
    at, first = submitted(queue, entry(50, 4))
    again, second = submitted(queue, entry(50, 4, "other"))
    assert again == at
    creditors = {name for name in parts(first) if name != at}
    assert {name for name in parts(second) if name != at} <= creditors


def test_what_lies_elsewhere_for_the_same_text_takes_no_room() -> None:
    alike = structs.replace(LENDS, beside={"second": ModelLengths(ALONE, 200)})
    queue = opened(*NAMES, limits=alike)
    at, first = submitted(queue, entry(70, 10))
    away = [one for one in first.placement if not one.local]
    queue.on_event(at, beat(8, tuple(away)), 0.0)
    for one in away:
        queue.on_event(one.inst_id, beat(8), 0.0)
    another = entry(70, 10, "another")
    another.spec = structs.replace(another.spec, prompt=another.spec.prompt[::-1])
    salted = entry(70, 10, "salted")
    salted.spec = structs.replace(salted.spec, cache_salt="its own")
    lines = list(queue.lines.values())
    for refused in (another, salted, to_second(entry(70, 10, "second's"))):
        assert queue.placements.homes(refused, lines) == []
    again, same = submitted(queue, entry(70, 10, "same"))
    assert again == at
    assert parts(same) == {at: 3, away[0].inst_id: 4, away[1].inst_id: 3}


@pytest.mark.parametrize(("tokens", "known"), [(16, 1), (17, 2), (33, 4), (70, 5)])
def test_only_what_both_have_is_shared(tokens: int, known: int) -> None:
    """The last token is computed anyway, and of the text so much is elsewhere."""
    queue = opened(*NAMES)
    at, first = submitted(queue, entry(70, 10))
    away = tuple(one for one in first.placement if not one.local)
    queue.on_event(at, beat(0, away), 0.0)
    for one in away:
        queue.on_event(one.inst_id, beat(ALONE), 0.0)
    _, second = submitted(queue, entry(tokens, 90 - tokens, "second"))
    blocks = -(-90 // SECTION)
    assert sum(parts(second).values()) == blocks
    lines = {name: queue.line(name) for name in NAMES}
    shared = queue.placements._shared_sections(entry(tokens, 4), lines[at])
    assert shared.total() == known
    assert all(count <= parts(first)[name] for name, count in shared.items())


def test_short_requests_go_where_there_is_room_for_them() -> None:
    queue = opened(*NAMES)
    at, command = submitted(queue, entry(70, 10))
    lending = {name: count for name, count in parts(command).items() if name != at}
    (roomy,) = (name for name, count in lending.items() if count == 2)
    # Three sections of one creditor and two of the other are still to come.
    assert submitted(queue, entry(12, 8, "short"))[0] == roomy
    reported = tuple(
        RequestPlacementEntry(RequestId("long"), name, count, local=False)
        for name, count in lending.items()
    )
    queue.on_finished(Finished(RequestId("short"), 0, "length"), 1.0)
    queue.on_event(at, beat(0, reported), 1.0)
    for name, count in lending.items():
        queue.on_event(name, beat(ALONE - count * SECTION), 1.0)
    assert submitted(queue, entry(12, 8, "next"))[0] == roomy, "they are there, and counted once"
    queue.on_finished(Finished(RequestId("long"), 0, "length"), 2.0)
    assert queue.placements.roomy(entry(90), list(queue.lines.values())) == list(
        queue.lines.values()
    )


def test_a_request_waits_for_memory_and_a_heartbeat_tells_of_it() -> None:
    queue = opened(*NAMES, credits=1)
    for name in NAMES:
        due_with(queue, entry(4, 4, f"short-{name}"))
    assert due_with(queue, entry(90, 4)) == [], "no credit is left"
    for name in NAMES:
        queue.on_event(name, beat(4), 1.0)
    told = queue.on_events("mixed-0", [Finished(RequestId("short-mixed-0"), 0, "length")], 1.0)
    assert told == [] and queue.awaits_memory
    for name in NAMES:
        told += queue.on_events(name, [beat(ALONE)], 2.0)
    ((_, command),) = told
    assert isinstance(command, Submit) and command.placement


def test_after_a_death_it_is_placed_anew() -> None:
    queue = opened(*NAMES)
    at, command = submitted(queue, entry(50, 4))
    queue.lost(at, InstanceDeath("it died", "killed"), 1.0)
    ((again, second),) = queue.due(2.0)
    assert again != at and second.attempt == command.attempt + 1
    assert at not in parts(second) and second.placement


def test_it_neither_moves_nor_asks_for_its_history() -> None:
    queue = opened(*NAMES)
    request = entry(50, 4)
    request.spec = structs.replace(request.spec, session="s")
    _, command = submitted(queue, request)
    assert (command.goes_to, command.pulls_from) == ("", "")
    queue.on_finished(Finished(request.request_id, 0, "length"), 1.0)
    later = entry(60, 4, "later")
    later.spec = structs.replace(later.spec, session="s")
    _, command = submitted(queue, later)
    assert command.placement and command.pulls_from == ""


def test_loans_of_shorter_requests_count_too() -> None:
    """Whoever borrows already computes the long one, and whoever lends does not."""
    queue = opened(*NAMES)
    short = RequestId("short")
    told = (
        RequestPlacementEntry(short, "mixed-2", 2, local=True),
        RequestPlacementEntry(short, "mixed-0", 1, local=False),
    )
    queue.on_event("mixed-2", beat(ALONE, told), 0.0)
    homes = queue.placements.homes(entry(50, 4), list(queue.lines.values()))
    assert [one.instance_id for one in homes] == ["mixed-2"]
    at, command = submitted(queue, entry(50, 4))
    assert at == "mixed-2" and "mixed-2" not in {n for n in parts(command) if n != at}


def test_loans_of_a_dead_instance_count_no_more() -> None:
    """It borrowed from both others, which are free again while it is away."""
    queue = opened(*NAMES)
    short = RequestId("short")
    told = tuple(
        RequestPlacementEntry(short, name, 1, local=name == "mixed-2") for name in reversed(NAMES)
    )
    queue.on_event("mixed-2", beat(ALONE, told), 0.0)
    queue.lost("mixed-2", InstanceDeath("it died", "killed"), 1.0)
    _, command = submitted(queue, entry(50, 4))
    assert set(parts(command)) == {"mixed-0", "mixed-1"}


# ------------------------------------------------------- what fits a pool, but not what is free


def full(queue: RequestQueue, **free: int) -> None:
    for name, line in queue.lines.items():
        number = name.rpartition("-")[2]
        tokens = ALONE - free.get(f"m{number}", ALONE)
        line.on_heartbeat(Heartbeat(load(ALONE - tokens, ALONE, running=1, held_tokens=tokens)))


def test_a_request_that_fits_nowhere_now_comes_with_a_placement() -> None:
    """It has 30 tokens of 40; one instance has 29 free, and keeps an eighth of its pool."""
    queue = opened(*NAMES)
    full(queue, m0=29, m1=24, m2=24)
    at, command = submitted(queue, entry(30, 2))
    assert at == "mixed-0" and parts(command)[at] == 3
    assert sum(parts(command).values()) == 4


@pytest.mark.parametrize("free", [{"m0": 30, "m1": 24, "m2": 24}, {"m0": 29, "m1": 9, "m2": 9}])
def test_it_comes_without_where_one_has_room_or_none_lends_enough(free: dict[str, int]) -> None:
    queue = opened(*NAMES)
    full(queue, **free)
    _, command = submitted(queue, entry(30, 2))
    assert not command.placement


def test_it_waits_where_reading_elsewhere_would_take_too_long() -> None:
    slow = structs.replace(LENDS, prices=ExecCosts(away_token_seconds=10.0))
    queue = opened(*NAMES, limits=slow)
    full(queue, m0=29, m1=24, m2=24)
    _, command = submitted(queue, entry(30, 2))
    assert not command.placement


def test_prompts_of_prefill_instances_are_not_placed() -> None:
    queue = opened("prefill-0", "decode-0", "decode-1")
    full(queue, m0=29, m1=24)
    _, command = submitted(queue, entry(30, 2))
    assert not command.placement

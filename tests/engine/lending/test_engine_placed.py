"""Requests longer than the memory of their instance, over pages that can be read back."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvell.engine.lending.placement import PATIENCE_TICKS, RETRY_TICKS, Placement
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.request import Request
from kvell.errors import ChangeSomething
from kvell.mempool.entries import Ticked
from kvell.vocabulary import RequestId
from tests.depth import machine
from tests.engine.lending.borrowing import Lending, away, end, lent, preemptions, run, turn
from tests.engine.lending.placing import LARGE, NAME, PROMPT, TO_BOTH, answered, placed, starts
from tests.engine.moving.handing_over import (
    REACH_TOKENS,
    SECTION_TOKENS,
    Cluster,
    Entry,
    Extras,
)
from tests.engine.moving.machine import NAMES, cluster_of, prompt_of
from tests.engine.virtual_model import expected_output
from tests.models.cases import covering


def fill(cluster: Cluster, name: str) -> None:
    """Let an instance have a request that takes its memory, and go no further for now."""
    own = Entry(prompt_of(2, 41), 3, "")
    cluster.submit(f"own-{name}", own, name, "")
    while not own.emitted:
        cluster.step(name)


def tick(cluster: Cluster, ticks: int) -> None:
    cluster.pass_time(ticks)
    while cluster.messages:
        cluster.deliver(0)


def test_a_prompt_longer_than_the_memory_here() -> None:
    cluster = placed()
    run(cluster, lambda: answered(cluster))
    assert away(cluster.instances["p"]) == len(PROMPT) // SECTION_TOKENS - 3 or lent(cluster) == 5
    assert lent(cluster) == 5 and lent(cluster, "e") >= 2
    end(cluster)
    ended = cluster.entries[NAME].end
    assert ended is not None and ended.reason == "length"
    assert len(cluster.entries[NAME].emitted) == 12 and preemptions(cluster) == 0


def test_no_more_is_ever_here_than_was_planned() -> None:
    cluster = placed((("p", 2), ("d", 5), ("e", 5), ("f", 1)))
    debtor = cluster.instances["p"]
    (group,) = debtor.core.memory.layout.groups
    most = 0
    for _ in range(400):
        if cluster.entries[NAME].end:
            break
        cluster.step("p")
        for request in debtor.core.running:
            held = debtor.core.memory.held_pages(request.handle)
            most = max(most, len(held) * group.page_tokens)
        if cluster.messages:
            cluster.deliver(0)
        for name in NAMES:
            cluster.copy(name, 0, 99)
    assert 0 < most <= 2 * SECTION_TOKENS
    end(cluster)


def test_short_requests_run_beside_it() -> None:
    """On its own instance, and on its creditors."""
    cluster = placed((("p", 4), ("d", 5), ("e", 4)))
    run(cluster, lambda: lent(cluster) > 1)
    short = {name: Entry(prompt_of(3, 6), 4, "") for name in NAMES}
    for name, entry in short.items():
        cluster.submit(f"own-{name}", entry, name, "")
    run(cluster, lambda: all(entry.end for entry in short.values()))
    assert cluster.entries[NAME].end is None, "they ended beside it"
    end(cluster)
    assert len(cluster.entries[NAME].emitted) == 12


def test_a_creditor_that_refuses_is_passed_over() -> None:
    """The plan was old: it has nothing to lend."""
    cluster = placed((("p", 4), ("d", 2), ("e", 5), ("d", 2)), large=LARGE)
    fill(cluster, "d")
    for _ in range(12):
        cluster.step("p")
        cluster.copy("e", 0, 99)
        while cluster.messages:
            cluster.deliver(0)
    assert lent(cluster, "d") == 0 and lent(cluster, "e") > 2
    end(cluster)
    assert len(cluster.entries[NAME].emitted) == 12


def test_it_waits_for_a_creditor_that_is_busy() -> None:
    cluster = placed((("p", 4), ("d", 5), ("e", 4)))
    for name in "de":
        fill(cluster, name)
    for _ in range(8):
        cluster.step("p")
        while cluster.messages:
            cluster.deliver(0)
    debtor = cluster.instances["p"]
    assert away(debtor) == 0 and debtor.core.running[0].is_held_up
    assert not debtor.core.has_work, "it does not spin"
    deadline = debtor.handovers.next_deadline
    assert deadline is not None and deadline <= cluster.now + RETRY_TICKS
    run(cluster, lambda: all(cluster.entries[f"own-{name}"].end for name in "de"))
    tick(cluster, RETRY_TICKS)
    end(cluster)
    assert preemptions(cluster) == 0 and len(cluster.entries[NAME].emitted) == 12


def test_where_nobody_lends_it_is_refused_and_may_come_later() -> None:
    cluster = placed((("p", 4), ("x", 9)))
    debtor = cluster.instances["p"]
    for _ in range(8):
        cluster.step("p")
        cluster.messages.clear()
    assert debtor.core.running[0].is_held_up
    for _ in range(40):
        cluster.now += PATIENCE_TICKS // 10
        cluster.hear(debtor, debtor.engine.on_entry(Ticked(cluster.now)))
        cluster.messages.clear()
        cluster.step("p")
    ended = cluster.entries[NAME].end
    assert ended is not None and ended.reason == "refused" and ended.try_later
    assert "no other instance can lend any" in ended.message
    assert debtor.handovers.borrowed.step_ticks < PATIENCE_TICKS // 10, "a wait is no step"
    end(cluster)


def test_of_two_debtors_that_wait_for_each_other_one_goes_on() -> None:
    """Two fronts placed them at the same time, and no pool holds what both need."""
    cluster = cluster_of("full", LARGE)
    for name, other in ("pd", "dp"):
        placement = ((name, 4), (other, 4), ("e", 5))
        cluster.submit(name, Entry(prompt_of(ord(name), 90), 12, "", placement=placement), name, "")
    one_goes_on(cluster, "d", "p")


def test_of_two_requests_that_wait_for_each_other_the_first_goes_on() -> None:
    """At one debtor, where each has borrowed a part of what both need."""
    cluster = cluster_of("full", LARGE)
    for name, first, second in (("a", "e", "d"), ("b", "d", "e")):
        placement = (("p", 2), (first, 5), (second, 5))
        cluster.submit(name, Entry(prompt_of(ord(name), 90), 12, "", placement=placement), "p", "")
    one_goes_on(cluster, "a", "b")


def one_goes_on(cluster: Cluster, first: str, second: str) -> None:
    """Both are stuck; the second one gives way long before its patience ends."""
    begin = cluster.now
    while not any(cluster.entries[name].end for name in (first, second)):
        for _ in range(20):
            turn(cluster)
        tick(cluster, RETRY_TICKS)
    given_way = cluster.entries[second].end
    assert given_way is not None and given_way.not_taken == "rival"
    assert cluster.now - begin < PATIENCE_TICKS
    end(cluster)
    ended = cluster.entries[first].end
    assert ended is not None and ended.reason == "length"


SHORT = prompt_of(1, 34)
"""A prompt that fits into a pool of 48 tokens with its answer."""


def short(placement: Sequence[tuple[str, int]]) -> Cluster:
    cluster = cluster_of("full", LARGE)
    assert len(SHORT) + 8 <= cluster.limits.max_model_len
    cluster.submit(NAME, Entry(SHORT, 8, "", placement=placement), "p", "")
    return cluster


def test_a_prompt_that_fits_here_may_have_a_placement_too() -> None:
    """Because most of this memory is another request's just now."""
    cluster = short((("p", 2), ("d", 4)))
    run(cluster, lambda: lent(cluster) >= 3)
    assert away(cluster.instances["p"]) >= 2 and not cluster.entries[NAME].end
    end(cluster)
    assert len(cluster.entries[NAME].emitted) == 8 and lent(cluster) == 0


def test_it_goes_on_here_where_creditors_refuse() -> None:
    """It waits for no deadline, and is not refused."""
    cluster = short((("p", 2), ("d", 4)))
    fill(cluster, "d")
    before = cluster.now
    run(cluster, lambda: answered(cluster))
    assert cluster.now - before < RETRY_TICKS and lent(cluster) == 0
    end(cluster)
    ended = cluster.entries[NAME].end
    assert ended is not None and ended.reason == "length" and preemptions(cluster) == 0


def test_it_goes_on_here_beyond_what_was_planned() -> None:
    """Answers longer than usual need more sections than were planned for."""
    cluster = short((("p", 2), ("d", 1)))
    run(cluster, lambda: answered(cluster))
    assert lent(cluster) == away(cluster.instances["p"]) == 1
    end(cluster)
    ended = cluster.entries[NAME].end
    assert ended is not None and ended.reason == "length" and preemptions(cluster) == 0


def test_a_creditor_that_wants_it_back_gets_it_back() -> None:
    cluster = short((("p", 2), ("d", 4)))
    run(cluster, lambda: lent(cluster) >= 2)
    for number in range(2):
        cluster.submit(f"own-{number}", Entry(prompt_of(2 + number, 38), 4, ""), "d", "")
    end(cluster)
    assert len(cluster.entries[NAME].emitted) == 8


def test_a_recalled_section_goes_to_another_creditor() -> None:
    """Its pages come from the creditor that wants them back, and nothing is computed again."""
    cluster = placed((("p", 2), ("d", 5), ("e", 3), ("e", 2), ("d", 1)), max_tokens=6)
    debtor, recalls = cluster.instances["p"], cluster.instances["d"]
    run(cluster, lambda: lent(cluster) == 5 and away(debtor) >= 5)
    spare = lent(cluster, "e")
    cluster.submit("own", Entry(prompt_of(2, 12), 2, ""), "d", "")
    run(cluster, lambda: debtor.handovers.borrowed.tally()["replaced"] > 0)
    assert lent(cluster, "e") > spare and len(recalls.core.running) <= 1
    end(cluster)
    assert preemptions(cluster) == 0
    assert debtor.handovers.borrowed.tally()["lost"] == 0
    assert len(cluster.entries["own"].emitted) == 2


@covering({"after": range(0, 60, 6), "dies": NAMES}, together=1)
def test_a_death_at_any_moment(dies: str, after: int) -> None:
    cluster = placed((("p", 4), ("d", 5), ("e", 5)))
    for _ in range(after):
        if cluster.messages:
            cluster.deliver(0)
        else:
            cluster.copy("d", 0, 5)
            cluster.copy("e", 0, 5)
            cluster.step("p")
    cluster.crash(dies)
    end(cluster)
    ended = cluster.entries[NAME].end
    assert ended is not None
    assert ended.reason == "length" or ended.try_later


def give_way(cluster: Cluster, at: str = "p") -> Request:
    """Let the only running request of an instance give its pages back, as others need them."""
    debtor = cluster.instances[at]
    (request,) = debtor.core.running
    debtor.core.scheduler.seats.start_again(request)
    cluster.hear(debtor, debtor.engine.on_entry(Ticked(cluster.now)))
    return request


def settle(cluster: Cluster) -> None:
    """Let all end, after a change that is not in the journal."""
    cluster.settle()
    entry = cluster.entries[NAME]
    assert entry.end is not None and len(entry.emitted) == entry.max_tokens
    assert entry.emitted == expected_output(entry.prompt, entry.max_tokens)
    assert not any(lent(cluster, name) for name in NAMES)


def silent(cluster: Cluster, creditor: str) -> None:
    """A creditor takes the youngest section back, and does not wait for an answer."""
    lender = cluster.instances[creditor]
    lending = lender.handovers.agent.lending
    counts = [1] * len(cluster.layout.groups)
    cluster.act(lender, lending.recall(counts, cluster.now, 0))


def test_what_lies_before_a_lost_section_is_not_computed_again() -> None:
    cluster = placed(max_tokens=6)
    debtor = cluster.instances["p"]
    run(cluster, lambda: answered(cluster) and away(debtor) >= 9)
    (request,) = debtor.core.running
    silent(cluster, "e")
    while not request.preemptions:
        cluster.deliver(0)
    before = len(starts(cluster))
    kept = request.remote_tokens
    assert kept >= 8 * SECTION_TOKENS and lent(cluster, "d") == 5
    end(cluster)
    assert starts(cluster)[before] == min(starts(cluster)[before:]) == kept
    assert preemptions(cluster) == 1


def test_a_missed_step_takes_back_only_what_may_be_gone() -> None:
    """The step reads before the debtor hears that the section is lost."""
    cluster = placed(max_tokens=30)
    debtor = cluster.instances["p"]
    run(cluster, lambda: answered(cluster) and away(debtor) >= 9)
    silent(cluster, "e")
    held, before = cluster.messages[:], len(starts(cluster))
    cluster.messages.clear()
    cluster.step("p")
    assert debtor.handovers.borrowed.tally()["lost"] > 0, "its step was missed"
    cluster.messages.extend(held)
    end(cluster)
    assert preemptions(cluster) == 1 and starts(cluster)[before + 1] == 0, "nobody knew which"


def test_a_request_that_gives_way_keeps_what_lies_elsewhere() -> None:
    cluster = placed()
    debtor = cluster.instances["p"]
    run(cluster, lambda: answered(cluster) and away(debtor) >= 8)
    sections, before = away(debtor), len(starts(cluster))
    give_way(cluster)
    turn(cluster)
    assert starts(cluster)[before] == sections * SECTION_TOKENS
    settle(cluster)
    assert preemptions(cluster) == 1 and debtor.handovers.borrowed.tally()["lost"] == 0


def test_what_is_kept_for_a_request_that_waits_is_recalled_at_once() -> None:
    cluster = placed()
    debtor = cluster.instances["p"]
    run(cluster, lambda: answered(cluster) and away(debtor) >= 8)
    request = give_way(cluster)
    assert request.remote_tokens >= 8 * SECTION_TOKENS
    lender = cluster.instances["d"]
    one = [1] * len(cluster.layout.groups)
    cluster.act(lender, lender.handovers.agent.lending.recall(one, cluster.now, 2_000))
    while cluster.messages:
        cluster.deliver(0)
    assert lent(cluster, "d") == 4 and request.remote_tokens == 4 * SECTION_TOKENS
    settle(cluster)


def test_what_lies_here_too_is_not_read_elsewhere() -> None:
    """Another request has computed the same prefix meanwhile."""
    cluster = placed(large=30)
    debtor = cluster.instances["p"]
    run(cluster, lambda: answered(cluster) and away(debtor) == 9)
    same = Entry(PROMPT, 1, "")
    cluster.submit("same", same, "p", "")
    run(cluster, lambda: same.end is not None)
    request = give_way(cluster)
    turn(cluster)
    assert request.remote_tokens == 0 and starts(cluster)[-1] > 9 * SECTION_TOKENS
    settle(cluster)


def test_a_request_resumes_after_what_is_elsewhere_though_its_prefix_is_in_a_buffer() -> None:
    """Another request has computed the same prefix; it was evicted into the CPU buffer."""
    cluster = cluster_of("full", 12, extras=Extras(buffer=40, seed=-1))
    prompt = prompt_of(1, 44)
    entry = Entry(prompt, 16, "", placement=(("p", 2), ("d", 5)))
    cluster.submit(NAME, entry, "p", "")
    debtor = cluster.instances["p"]
    run(cluster, lambda: away(debtor) == 4)
    for number, other in enumerate([Entry(prompt, 1, ""), Entry(prompt_of(4, 50), 1, "")]):
        cluster.submit(f"other-{number}", other, "p", "")
        run(cluster, partial(ends, other))
    request = give_way(cluster)
    swapping = debtor.core.scheduler.swapping
    assert swapping is not None and swapping.prefixes is not None
    kept = request.remote_tokens
    (group,) = cluster.layout.groups
    assert 0 < kept < len(swapping.prefixes.pages) * group.page_tokens
    before = len(starts(cluster))
    turn(cluster)
    assert starts(cluster)[before] == kept
    settle(cluster)
    assert preemptions(cluster) == 1


def ends(entry: Entry) -> bool:
    return entry.end is not None


def submission(prompt: Sequence[int], entry: Entry) -> Submit:
    text = np.asarray(prompt, "<i4").tobytes()
    return Submit(RequestSpec(RequestId(NAME), text, SamplingParams()), placement=entry.parts(NAME))


def refusal(cluster: Cluster, command: Submit) -> Finished:
    (event,) = cluster.instances["p"].engine.tell(command)
    assert isinstance(event, Finished) and event.reason == "refused"
    return event


def test_what_is_beyond_its_placement_is_refused() -> None:
    cluster = cluster_of("full", LARGE)
    short = Entry([], 1, "", placement=(("p", 4), ("d", 5)))
    said = refusal(cluster, submission(prompt_of(1, 72), short))
    assert said.field == "prompt" and "72" in said.message
    far = Entry([], 1, "", placement=(("p", 4), ("d", 50)))
    said = refusal(cluster, submission(prompt_of(1, REACH_TOKENS), far))
    assert str(REACH_TOKENS) in said.message


def test_what_stays_does_not_go_elsewhere() -> None:
    command = submission(PROMPT, Entry([], 1, "", placement=TO_BOTH))
    with pytest.raises(ChangeSomething, match="placement"):
        replace(command, goes_to="d")
    with pytest.raises(ChangeSomething, match="placement"):
        replace(command, pulls_from="d")


def held_up(cluster: Cluster) -> Request:
    return cluster.instances["p"].core.running[0]


def next_retry(one: Placement) -> int | None:
    """A call, so that mypy forgets what was asserted of it before."""
    return one.retry_at


def test_creditors_are_asked_in_turn_and_again() -> None:
    cluster = placed()
    cluster.step("p")
    entries = cluster.entries[NAME].parts(NAME)
    one = Placement.of(held_up(cluster), entries)
    assert [one.creditor(at, 0) for at in (0, 4, 5, 8)] == ["d", "d", "e", "e"]
    assert one.creditor(0, 0, without="d") == "e"
    one.refuses("d")
    assert one.creditor(0, 0) == "e"
    assert next_retry(one) is None
    one.refuses("e")
    assert one.creditor(0, 7) == ""
    assert next_retry(one) == 7 + RETRY_TICKS
    one.widen("f")
    assert one.creditor(0, 8) == "f"
    one.tick(7 + RETRY_TICKS, is_asking=False)
    assert one.creditor(0, 9) == "d"
    end(cluster)


@pytest.mark.parametrize(
    ("step_ticks", "patience_ticks"), [(100, 20_000), (2_000, 80_000), (60_000, 300_000)]
)
def test_a_request_that_is_held_up_waits_longer_where_steps_take_long(
    step_ticks: int, patience_ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = placed()
    cluster.step("p")
    request = held_up(cluster)
    one, now = Placement.of(request, cluster.entries[NAME].parts(NAME)), 0
    monkeypatch.setattr(Request, "is_held_up", True)
    while not one.tick(now, is_asking=False, step_ticks=step_ticks):
        while creditor := one.creditor(0, now):
            one.refuses(creditor)
        now += 100
        assert now < 400_000
    assert patience_ticks <= now <= patience_ticks + 2 * RETRY_TICKS
    monkeypatch.undo()
    end(cluster)


class PlacedLending(Lending):
    """The same schedules, with prompts that are longer than an instance's memory."""

    @rule(
        family=st.integers(0, 3),
        length=st.integers(30, 120),
        max_tokens=st.integers(1, 20),
        order=st.permutations(NAMES),
        local=st.integers(1, 4),
    )
    def submit_placed(
        self, family: int, length: int, max_tokens: int, order: list[str], local: int
    ) -> None:
        blocks = -(-(length + max_tokens) // SECTION_TOKENS)
        most = self.cluster.limits.max_model_len // SECTION_TOKENS
        local = max(1, min(local, most))
        each = -(-max(0, blocks - local) // 2)
        placement = [(order[0], local), (order[1], each), (order[2], each)]
        name = f"r{self.count}"
        entry = Entry(prompt_of(family, length), max_tokens, "", placement=placement)
        self.cluster.submit(name, entry, order[0], "")
        self.count += 1


@pytest.mark.long
def test_whatever_happens_answers_are_right() -> None:
    run_state_machine_as_test(PlacedLending, settings=machine(40, weight=1.5))

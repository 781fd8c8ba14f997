"""The CPU buffer as a source of what moves between instances: nothing is fetched to be sent."""

from collections.abc import Callable

import numpy as np
import pytest

from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.mempool.transfers.messages import Offer
from tests.elastic.buffer_audit import audit_pages
from tests.engine.moving.handing_over import Cluster, Entry, Extras, Instance
from tests.engine.moving.machine import ALL_MIXES, MIXES, cluster_of, prompt_of

ALWAYS_IN = Extras(buffer=40, seed=-1)
KNOWN = prompt_of(1, 40)


def swapping_of(instance: Instance) -> Swapping:
    swapping = instance.core.scheduler.swapping
    assert swapping is not None and swapping.prefixes is not None
    return swapping


def buffer_of(cluster: Cluster, name: str = "e") -> PageBuffer:
    return swapping_of(cluster.instances[name]).buffer


def hit_of(instance: Instance, tokens: list[int]) -> int:
    return instance.core.memory.peek(np.asarray([*tokens, 99], np.int32), "")


def fill(cluster: Cluster, count: int = 4, name: str = "e") -> None:
    """Let other requests take an instance's memory."""
    for _ in range(count):
        number = len(cluster.entries)
        other = Entry(prompt_of(3 + number, 40 + number % 3), 12, "")
        cluster.submit(f"filler{number}", other, name, "")
        while other.end is None:
            cluster.step(name)


def with_buffered_text(mix: str) -> tuple[Cluster, list[int]]:
    cluster = cluster_of(mix, large=24, extras=ALWAYS_IN)
    known = Entry(KNOWN, 5, "")
    cluster.submit("known", known, "e", "")
    cluster.settle()
    text = [*known.prompt, *known.emitted]
    fill(cluster)
    assert hit_of(cluster.instances["e"], text) < 20, "the pool still has it"
    return cluster, text


@pytest.mark.parametrize("mix", list(MIXES))
def test_a_text_in_the_buffer_is_sent_from_there(mix: str) -> None:
    cluster, text = with_buffered_text(mix)
    asked, owner = cluster.instances["p"], cluster.instances["e"]
    fetched, hit = buffer_of(cluster).counts.in_pages, hit_of(owner, text)
    entry = Entry([*text, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", "", pulls_from="e")
    cluster.settle()
    cluster.check_ends()
    assert asked.model.tokens_computed == 4 + 3, "its last token, three new ones, and three drawn"
    counts = buffer_of(cluster).counts
    assert counts.sent_pages > 0
    assert (counts.in_pages, hit_of(owner, text)) == (fetched, hit), "it was brought into the pool"


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("ends", ["read", "dies", "times out"])
def test_pages_that_are_read_outlast_what_they_were_cached_for(mix: str, ends: str) -> None:
    """Prefixes are dropped and the buffer is filled again before the asker has read all."""
    cluster, text = with_buffered_text(mix)
    owner, buffer = cluster.instances["e"], buffer_of(cluster)
    entry = Entry([*text, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", "", pulls_from="e")
    while not cluster.instances["p"].copying:
        cluster.deliver(0)
    sent = owner.handovers.agent.copies.sent
    assert sent is not None and len(sent) == 1
    owner.core.scheduler.drop_reserves()  # no command of a journal does
    owner.check_journal = lambda: None  # type: ignore[method-assign]
    fill(cluster, 6)
    assert audit_pages(buffer) == [] and buffer.used_large > 0
    if ends == "dies":
        cluster.crash("p")
    elif ends == "times out":
        cluster.pass_time(1_000_000)
    cluster.settle()
    cluster.check_ends()
    assert not len(sent)
    if ends == "read":
        assert cluster.instances["p"].model.tokens_computed == 4 + 3


def test_an_instance_without_a_buffer_asks_one_with_a_buffer() -> None:
    cluster, text = with_buffered_text("windows")
    cluster.extras = Extras()
    cluster.start("p")
    entry = Entry([*text, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", "", pulls_from="e")
    cluster.settle()
    cluster.check_ends()
    assert cluster.instances["p"].model.tokens_computed == 4 + 3


def with_buffered_request(mix: str, ahead: int) -> tuple[Cluster, str]:
    """Requests of one instance that is short of memory, and one of them in its buffer.

    :param ahead: see :class:`.Extras`.
    """
    extras = Extras(buffer=60, ahead=ahead, seed=-1)
    cluster = cluster_of(mix, large=14, extras=extras)
    for number in range(4):
        entry = Entry(prompt_of(number, 20 + number), 25, "")
        cluster.submit(f"r{number}", entry, "e", "")
    core = cluster.instances["e"].core
    while True:
        cluster.step("e")
        waiting = (name for name, request in core.requests.items() if in_buffer(cluster, request))
        if found := next(waiting, ""):
            return cluster, found


def in_buffer(cluster: Cluster, request: object) -> bool:
    core = cluster.instances["e"].core
    return core.scheduler.can_leave_buffer(request)  # type: ignore[arg-type]


def until(cluster: Cluster, happens: Callable[[], bool]) -> None:
    """Let messages go between instances, and the short one compute, until something happens."""
    while not happens():
        while cluster.messages and not happens():
            cluster.deliver(0)
        cluster.copy("p", 0, 99)
        cluster.step("e")


@pytest.mark.parametrize("ahead", [0, 20], ids=["preempted", "parked"])
@pytest.mark.parametrize("mix", list(ALL_MIXES))
def test_a_request_in_the_buffer_leaves_from_there(mix: str, ahead: int) -> None:
    cluster, name = with_buffered_request(mix, ahead)
    entry, short = cluster.entries[name], cluster.instances["e"]
    fetched, made = short.core.stats().rungs["swap_in"], len(entry.emitted)
    cluster.migrate(name, "p")
    until(cluster, lambda: entry.at == "p")
    assert len(entry.emitted) == made, "it was resumed first"
    assert swapping_of(short).counters()["swap_in"] == fetched
    assert buffer_of(cluster).counts.sent_pages > 0
    cluster.settle()
    cluster.check_ends()
    if mix != "drafts":  # the pages of a draft model are filled again
        assert cluster.instances["p"].model.tokens_computed == entry.max_tokens - made


@pytest.mark.parametrize("ahead", [0, 20], ids=["preempted", "parked"])
@pytest.mark.parametrize("end", ["its target dies", "its time passes", "it is cancelled"])
def test_a_request_that_could_not_leave_is_resumed_from_the_buffer(ahead: int, end: str) -> None:
    cluster, name = with_buffered_request("windows", ahead)
    entry = cluster.entries[name]
    cluster.migrate(name, "p")
    until(cluster, lambda: any(isinstance(sent[-1], Offer) for sent in cluster.messages))
    if end == "its target dies":
        cluster.crash("p")
    elif end == "its time passes":
        cluster.messages.clear()
        cluster.pass_time(1_000_000)
    else:
        cluster.cancel(name)
    cluster.settle()
    cluster.check_ends()
    assert (entry.end is not None) and entry.at == "e"
    assert bool(cluster.moved) is False


def with_full_pool(mix: str, buffer: int = 60) -> tuple[Cluster, list[int]]:
    """An instance without room for a text that another one has cached."""
    cluster = cluster_of(mix, large=20, extras=Extras(buffer=buffer, seed=-1))
    known = Entry(KNOWN, 5, "")
    cluster.submit("known", known, "e", "")
    cluster.settle()
    for number in range(4):
        cluster.submit(f"r{number}", Entry(prompt_of(3 + number, 45), 14, ""), "p", "")
    core = cluster.instances["p"].core
    while core.memory.empty_large_pages() > 1 or len(core.scheduler.seats.running) < 2:
        cluster.step("p")
    return cluster, [*known.prompt, *known.emitted]


@pytest.mark.parametrize("mix", list(MIXES))
def test_a_text_that_finds_no_room_is_received_in_the_buffer(mix: str) -> None:
    cluster, text = with_full_pool(mix)
    asker = cluster.instances["p"]
    buffered = asker.handovers.agent.receiving.buffered
    assert buffered is not None
    entry = Entry([*text, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", "", pulls_from="e")
    while not asker.copying:
        cluster.deliver(0)
    assert len(buffered) == 1, "the pool had room"
    while asker.copying:
        cluster.copy("p", 0, 99)
    prefixes = swapping_of(asker).prefixes
    assert prefixes is not None and not len(buffered) and len(prefixes.pages) > 0
    hits = prefixes.hit_tokens
    cluster.settle()
    cluster.check_ends()
    assert prefixes.hit_tokens > hits, "what came was not used"


@pytest.mark.parametrize("end", ["its sender dies", "its time passes", "the buffer is full"])
def test_a_text_that_does_not_come_leaves_the_buffer(end: str) -> None:
    cluster, text = with_full_pool("windows", 1 if end == "the buffer is full" else 60)
    asker, buffer = cluster.instances["p"], buffer_of(cluster, "p")
    before = buffer.used_large
    entry = Entry([*text, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", "", pulls_from="e")
    while cluster.messages and not asker.copying:
        cluster.deliver(0)
    assert bool(asker.copying) == (end != "the buffer is full")
    if end == "its sender dies":
        cluster.crash("e")
    elif end == "its time passes":
        cluster.pass_time(1_000_000)
    cluster.copy("p", 0, 0)
    buffer.settle()
    assert buffer.used_large == before and audit_pages(buffer) == []
    cluster.settle()
    cluster.check_ends()

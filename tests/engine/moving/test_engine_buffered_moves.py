"""The CPU buffer as a source of what moves between instances: nothing is fetched to be sent."""

import numpy as np
import pytest

from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.cpu_buffer.swapping import Swapping
from tests.engine.moving.handing_over import Cluster, Entry, Extras, Instance
from tests.engine.moving.test_engine_handovers import MIXES, cluster_of, prompt_of

ALWAYS_IN = Extras(buffer=40, seed=-1)
KNOWN = prompt_of(1, 40)


def swapping_of(instance: Instance) -> Swapping:
    swapping = instance.core._scheduler.swapping
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
    """A text is cached at an instance, in its buffer only."""
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
    owner.core.let_go()  # no command of a journal does
    owner.check_journal = lambda: None  # type: ignore[method-assign]
    fill(cluster, 6)
    assert buffer.audit() == [] and buffer.used_large > 0
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

"""What the front's routes know of caches, and what they note in requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routed_request import BLAMELESS, MOST_RETRIES, Attempts, Cause, InstanceDeath
from kvell.cluster.routing.costs import RequestView
from kvell.cluster.steering.steering import Orders, Steering
from kvell.engine.protocol.messages import Heartbeat, Submit
from kvell.engine.protocol.notices import (
    BlocksHeld,
    BlocksRemoved,
    BlocksStored,
    IndexedGroup,
    IndexNotice,
    WatchIndex,
)
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.block_hashes import BlockHashes
from kvell.engine.requests.cache_roots import long_root
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.front.routes import FEWEST_TOKENS, Histories
from kvell.vocabulary import RequestId
from tests.front.scenarios import SIZE, hashes, stored
from tests.reports import facts, load

FULL = (IndexedGroup("full", SIZE),)


class Asked:
    """A router that notes what it is shown, and takes the first with most."""

    def __init__(self) -> None:
        self.requests: list[RequestView] = []

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        self.requests.append(request)
        return max(instances, key=lambda one: request.hits.get(one.instance_id, 0)).instance_id


class Front:
    """A queue that knows what its instances cache."""

    def __init__(self, *names: str) -> None:
        self.router = Asked()
        self.queue = RequestQueue(100, router=self.router, locality=PrefixDirectory())
        self.told = [one for name in names for one in self.open(name, 1)]
        self.count = 0

    def open(self, name: str, incarnation: int) -> list[tuple[str, WatchIndex]]:
        own = facts(8, incarnation, pool_bytes=1 << 20, token_bytes=1, indexed=FULL)
        return self.queue.open(name, own, joins_others=False)

    def submit(self, tokens: Sequence[int], salt: str = "") -> tuple[str, Submit]:
        """Route one request; the instance that got it."""
        prompt = np.asarray(tokens, "<i4").tobytes()
        self.count += 1
        sampling = SamplingParams(max_tokens=1)
        self.queue.add(
            LogEntry(
                RequestSpec(RequestId(f"r{self.count}"), prompt, sampling, cache_salt=salt), 0.0
            )
        )
        (submission,) = self.queue.due(0.0)
        return submission

    def notice(
        self, name: str, sequence: int, *changes: BlocksStored | BlocksRemoved | BlocksHeld
    ) -> list[WatchIndex]:
        notice = IndexNotice(sequence, changes, any(isinstance(c, BlocksHeld) for c in changes))
        told = self.queue.on_event(name, notice, 0.0)
        assert all(instance == name for instance, _ in told)
        return [command for _, command in told if isinstance(command, WatchIndex)]


TEXT = list(range(20))


def test_instances_are_asked_to_tell_what_they_cache_without_its_tokens() -> None:
    front = Front("mixed-0", "mixed-1")
    watch = WatchIndex(with_tokens=False)
    assert front.told == [("mixed-0", watch), ("mixed-1", watch)]


def test_nobody_is_asked_where_no_router_reads_it() -> None:
    queue = RequestQueue(100)
    told = queue.open("mixed-0", facts(8, 1, indexed=FULL), joins_others=False)
    assert told == []
    assert queue.on_event("mixed-0", IndexNotice(0, (stored(TEXT),)), 0.0) == []


def test_a_request_goes_to_what_was_told_and_not_to_what_was_dropped() -> None:
    front = Front("mixed-0", "mixed-1")
    assert front.notice("mixed-1", 0, stored(TEXT)) == []
    name, _ = front.submit([*TEXT, 99])
    assert name == "mixed-1"
    assert front.router.requests[-1].hits == {"mixed-1": 20}
    front.notice("mixed-1", 1, BlocksRemoved(0, hashes(TEXT)[2:]))
    front.submit([*TEXT, 98])
    assert front.router.requests[-1].hits["mixed-1"] == 8


def test_a_prompt_that_was_just_routed_counts_as_cached_there_soon() -> None:
    front = Front("mixed-0", "mixed-1")
    first, _ = front.submit([*TEXT, 99])
    again, _ = front.submit([*TEXT, 98])
    assert front.router.requests[-1].hits == {first: 20}
    assert again == first


def test_salts_keep_requests_apart() -> None:
    front = Front("mixed-0", "mixed-1")
    front.notice("mixed-1", 0, stored(TEXT, root="secret"))
    front.submit([*TEXT, 99])
    assert not front.router.requests[-1].hits
    name, _ = front.submit([*TEXT, 99], salt="secret")
    assert name == "mixed-1"


def test_after_a_gap_the_instance_is_asked_for_all_of_it() -> None:
    front = Front("mixed-0", "mixed-1")
    front.notice("mixed-1", 0, stored(TEXT[:8]))
    (command,) = front.notice("mixed-1", 2, stored([7] * 8))
    assert command == WatchIndex(with_tokens=False)
    assert front.notice("mixed-1", 3, BlocksHeld(0, hashes(TEXT))) == []
    front.submit([*TEXT, 99])
    assert front.router.requests[-1].hits == {"mixed-1": 20}


def test_what_a_dead_instance_had_is_gone_and_its_next_start_has_nothing() -> None:
    front = Front("mixed-0", "mixed-1")
    front.notice("mixed-1", 0, stored(TEXT))
    front.queue.lost("mixed-1", InstanceDeath("killed", "killed"), 0.0)
    front.open("mixed-1", 2)
    front.submit([*TEXT, 99])
    assert not front.router.requests[-1].hits


def test_an_attempt_behind_emitted_tokens_is_looked_up_with_them() -> None:
    front = Front("mixed-0", "mixed-1")
    front.notice("mixed-1", 0, stored(TEXT))
    prompt = np.asarray(TEXT[:12], "<i4").tobytes()
    entry = LogEntry(RequestSpec(RequestId("again"), prompt, SamplingParams()), 0.0, attempt=1)
    entry.output.extend(TEXT[12:18])
    front.queue.add(entry)
    front.queue.due(0.0)
    assert front.router.requests[-1].hits == {"mixed-1": 16}


def test_the_router_is_told_how_long_somebody_waits_for_a_first_token() -> None:
    front = Front("mixed-0", "mixed-1")
    for number, due in enumerate((None, 7.0)):
        prompt = np.asarray(range(4), "<i4").tobytes()
        sampling = SamplingParams(max_tokens=4)
        entry = LogEntry(
            RequestSpec(RequestId(f"d{number}"), prompt, sampling), 0.0, due_seconds=due
        )
        front.queue.add(entry)
        assert len(front.queue.due(2.0)) == 1
        if due is not None:
            entry.output.append(1)
            assert entry.left_seconds(2.0) is None, "its first token has come"
    assert [one.deadline_seconds for one in front.router.requests] == [None, 5.0]


def test_a_heartbeat_of_an_instance_with_free_memory_looks_at_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are: what it costs the front must not grow with them."""
    front = Front(*(f"mixed-{number}" for number in range(50)))
    looked: list[str] = []
    decide = Steering.decide

    def looks(steering: Steering, instances: Sequence[InstanceLoad], *others: Any) -> Orders:
        looked.extend(line.instance_id for line in instances)
        return decide(steering, instances, *others)

    monkeypatch.setattr(Steering, "decide", looks)
    for name in front.queue.lines:
        rich = Heartbeat(load(1 << 20, 1 << 20))
        assert front.queue.on_event(name, rich, 0.0) == []
    assert looked == []
    front.queue.on_event("mixed-0", Heartbeat(load(0, 1 << 20, waiting=1)), 0.0)
    assert len(looked) == 50


def test_a_text_under_the_long_rotation_table_has_blocks_of_its_own() -> None:
    directory = PrefixDirectory()
    directory.on_joined("a", "mixed", (IndexedGroup("full", SIZE, short_rope_tokens=2 * SIZE),))
    tokens = np.arange(3 * SIZE, dtype=np.int32)
    short, long = (directory.chain(tokens[:count], "", "") for count in (2 * SIZE, 2 * SIZE + 1))
    assert short.hashes[SIZE] == BlockHashes(SIZE, "", "").all_of(tokens[: 2 * SIZE])
    assert long.hashes[SIZE] == BlockHashes(SIZE, "", long_root("")).all_of(tokens[: 2 * SIZE])


@pytest.mark.parametrize("cause", sorted(BLAMELESS))
def test_an_end_that_no_request_caused_blames_none(cause: Cause) -> None:
    """Not even one that was alone; but nobody is tried for ever."""
    attempts = Attempts()
    assert [attempts.after(cause, sole=True) for _ in range(MOST_RETRIES)] == [None] * MOST_RETRIES
    assert (attempts.alone, attempts.deaths) == (0, MOST_RETRIES)
    refusal = attempts.after(cause, sole=True)
    assert refusal is not None and "retried twice" in refusal


@pytest.mark.parametrize("cause", ["crash", "hung", "protocol"])
def test_one_that_was_alone_twice_is_refused(cause: Cause) -> None:
    attempts = Attempts()
    assert attempts.after(cause, sole=True) is None
    refusal = attempts.after(cause, sole=True)
    assert refusal is not None and "two instances ended" in refusal


def test_only_a_crash_puts_a_request_on_probation_at_once() -> None:
    causes: tuple[Cause, ...] = ("crash", "killed", "cut", "hung", "protocol", "drained")
    on_probation = []
    for cause in causes:
        attempts = Attempts()
        attempts.after(cause, sole=False)
        if attempts.on_probation:
            on_probation.append(cause)
    assert on_probation == ["crash"]


LIVE = {"a": 1, "b": 2, "c": 3}


def histories(*noted: tuple[str, str, int]) -> Histories:
    found = Histories(3)
    for one in noted:
        found.note(*one, 100)
    return found


def test_the_latest_instance_of_a_session_is_asked() -> None:
    known = histories(("s", "a", 1), ("s", "b", 2))
    assert known.source("s", 500, "c", LIVE) == "b"
    known.note("s", "a", 1, 100)
    assert known.source("s", 500, "c", LIVE) == "a"


@pytest.mark.parametrize(
    ("session", "tokens", "chosen"),
    [("s", 500, "a"), ("other", 500, "c"), ("", 500, "c"), ("s", FEWEST_TOKENS - 1, "c")],
    ids=["it was here", "another session", "no session", "a short prompt"],
)
def test_nobody_is_asked(session: str, tokens: int, chosen: str) -> None:
    known = histories(("s", "a", 1), ("", "a", 1))
    assert known.source(session, tokens, chosen, LIVE) == ""


def test_an_instance_that_began_again_knows_nothing() -> None:
    known = histories(("s", "a", 1), ("s", "b", 2))
    assert known.source("s", 500, "c", {"a": 1, "b": 7, "c": 3}) == "a"
    assert known.source("s", 500, "c", {"c": 3}) == ""
    known.note("s", "c", 2, 100)
    assert known.source("s", 500, "c", LIVE) == "b"


def test_only_so_many_sessions_are_remembered() -> None:
    known = histories(*((f"s{number}", "a", 1) for number in range(3)))
    known.note("s0", "b", 2, 100)
    known.note("s3", "a", 1, 100)
    assert len(known) == 3
    assert known.source("s1", 500, "c", LIVE) == ""
    assert known.source("s0", 500, "c", LIVE) == "b"


def test_what_each_instance_has_of_a_session_is_its_latest_text() -> None:
    known = histories(("s", "a", 1), ("s", "b", 2))
    known.note("s", "a", 1, 300)
    assert known.tokens_at("s", LIVE) == {"b": 100, "a": 300}
    assert known.tokens_at("s", {"a": 7, "b": 2}) == {"b": 100}
    assert known.tokens_at("other", LIVE) == {}

"""Requests whose prompt one instance computes and another goes on with."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvell.engine.core.index_watch import IndexWatch, indexed_groups
from kvell.engine.moving.handovers import staying_reason
from kvell.engine.protocol.messages import Cancel, Finished, Submit
from kvell.engine.protocol.notices import IndexNotice
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.block_hashes import BlockHashes
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, GroupSpec, HoldingCore
from kvell.mempool.entries import Draining, PeerLost
from kvell.mempool.rendezvous import PD_CACHINGS, PdCaching
from kvell.mempool.transfers.messages import Offer, Prepare
from kvell.vocabulary import RequestId
from tests.engine.moving.handing_over import Cluster, Entry, Extras
from tests.engine.moving.machine import MIXES, NAMES, SOME, HandingOver, cluster_of, prompt_of, turn
from tests.engine.virtual_model import expected_output
from tests.engine.works import spec_of
from tests.pages.pools import Chunk, dropping, group, images, state

TestHandingOver = HandingOver.TestCase
TestHandingOver.settings = SOME


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("length", [1, 8, 23])
def test_the_prompt_is_computed_at_one_and_the_answer_at_the_other(mix: str, length: int) -> None:
    cluster = cluster_of(mix)
    entry = Entry(prompt_of(1, length), 9, "")
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 1
    assert entry.emitted == expected_output(entry.prompt, 9)
    assert cluster.instances["p"].model.tokens_computed == length
    assert cluster.instances["d"].model.tokens_computed == 8


def test_a_request_that_came_back_sends_its_text_to_nobody() -> None:
    """Its prompt was computed where it ends."""
    cluster = cluster_of(pd_caching=3)
    entry = Entry(prompt_of(1, 20), 12, "")
    cluster.submit("r", entry, "p", "d")
    for _ in range(200):
        while cluster.messages:
            cluster.deliver(0)
        for name in NAMES:
            cluster.copy(name, 0, 99)
            cluster.step(name)
        if cluster.moved == 1:
            cluster.migrate("r", "p")
        if entry.end:
            break
    assert cluster.moved == 2 and entry.at == "p"
    cluster.settle()
    cluster.check_ends()


def test_the_next_turn_crosses_without_what_is_there() -> None:
    cluster = cluster_of()
    first = Entry(prompt_of(1, 20), 6, "")
    cluster.submit("one", first, "p", "d")
    cluster.settle()
    second = Entry([*first.prompt, *first.emitted, 1, 2, 3], 4, "")
    cluster.submit("two", second, "p", "d")
    for _ in range(40):
        while cluster.messages:
            cluster.deliver(0)
        rows = [len(copying.rows) for copying in cluster.instances["d"].copying.values()]
        if rows:
            assert rows[0] <= 7  # of 15
        for name in NAMES:
            cluster.copy(name, 0, 99)
            cluster.step(name)
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 2


def test_who_waits_for_pages_of_a_text_that_was_to_come_goes_on_when_it_is_cancelled() -> None:
    """The instance had nothing to do, and does not have the request that the cancel is of."""
    cluster = cluster_of("full", large=10)
    cluster.submit("coming", Entry(prompt_of(1, 40), 9, ""), "p", "d")
    while cluster.messages:
        cluster.deliver(0)
    instance = cluster.instances["d"]
    assert len(instance.handovers.agent.holds)
    cluster.submit("waiting", Entry(prompt_of(2, 50), 4, ""), "d", "")
    for _ in range(3):
        cluster.step("d")
    assert not cluster.works("d") and instance.core.counters.num_waiting == 1
    cluster.entries["coming"].is_dropped = True
    cluster.hear(instance, instance.engine.tell(Cancel(RequestId("coming"))))
    assert cluster.works("d")
    cluster.cancel("coming")
    cluster.settle()
    cluster.check_ends()


def test_where_there_is_no_room_the_request_stays() -> None:
    cluster = cluster_of(large=20)
    blocker = Entry(prompt_of(2, 40), 15, "")
    cluster.submit("blocker", blocker, "d", "")
    for _ in range(4):
        cluster.step("d")
    entry = Entry(prompt_of(1, 40), 9, "")
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert entry.at in ("p", "d")
    assert entry.emitted == expected_output(entry.prompt, 9)


@pytest.mark.parametrize("kind", [Prepare, Offer])
def test_a_request_of_which_something_illegible_is_said_stays(kind: type[Prepare | Offer]) -> None:
    cluster = cluster_of()
    spoilt = 0
    deliver = cluster.deliver

    def delivered(index: int, *, loses: bool = False) -> None:
        nonlocal spoilt
        *of_whom, message = cluster.messages[index]
        if isinstance(message, kind) and message.private:
            spoilt += 1
            message = msgspec.structs.replace(message, private=b"\xc0")
            cluster.messages[index] = (*of_whom, message)  # type: ignore[assignment]
        deliver(index, loses=loses)

    cluster.deliver = delivered  # type: ignore[method-assign]
    entry = Entry(prompt_of(1, 20), 9, "")
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert spoilt and cluster.moved == 0 and entry.at == "p"
    assert entry.emitted == expected_output(entry.prompt, 9)


@pytest.mark.parametrize("batched", range(1, 9))
def test_a_request_moves_only_once_all_that_was_announced_is_computed(batched: int) -> None:
    """With an earlier attempt's output, a chunk may end a token before the last known one."""
    cluster = cluster_of(seats=1, batched=batched)
    entry = Entry(prompt_of(1, 12), 9, "", emitted=expected_output(prompt_of(1, 12), 5))
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 1


def stumble(cluster: Cluster, moments: int) -> None:
    """Go on by a message, a few pages and a step of each at a time."""
    for moment in range(moments):
        if cluster.messages:
            cluster.deliver(0)
        for name in NAMES:
            cluster.copy(name, 0, 2 + moment % 2)
            cluster.step(name)


@pytest.mark.parametrize("after", range(0, 12, 2))
@pytest.mark.parametrize("dies", ["p", "d"])
def test_a_death_at_any_moment_loses_nothing(dies: str, after: int) -> None:
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 30), 9, "")
    cluster.submit("r", entry, "p", "d")
    stumble(cluster, after)
    cluster.crash(dies)
    cluster.settle()
    cluster.check_ends()
    assert entry.end is not None and entry.end.reason == "length"


def test_no_step_is_planned_while_there_is_nothing_to_compute() -> None:
    """A request that is announced, or moving, needs no steps; nor does one that comes."""
    cluster = cluster_of()
    cluster.submit("r", Entry(prompt_of(1, 10), 5, ""), "p", "d")
    assert not cluster.works("p")  # announced
    cluster.deliver(0)
    assert not cluster.works("d")  # it comes
    cluster.deliver(0)
    assert cluster.works("p")
    cluster.step("p")
    assert not cluster.works("p")  # it moves
    cluster.deliver(0)
    cluster.copy("d", 0, 99)
    assert cluster.works("d")
    cluster.settle()
    cluster.check_ends()


def test_what_cannot_move_is_served_where_it_is() -> None:
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 12), 3, "")
    cluster.submit("short", Entry(prompt_of(1, 12), 1, ""), "p", "d")  # ends with its first token
    cluster.submit("r", entry, "p", "nobody")
    cluster.pass_time(1_000_000)
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 0


def second_turn(cluster: Cluster) -> tuple[int, int]:
    """Serve a conversation's two turns; tokens that each side computed of the second."""
    first = Entry(prompt_of(1, 20), 6, "")
    cluster.submit("one", first, "p", "d")
    cluster.settle()
    models = [cluster.instances[name].model for name in "pd"]
    before = [model.tokens_computed for model in models]
    second = Entry([*first.prompt, *first.emitted, 1, 2, 3], 4, "")
    cluster.submit("two", second, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 2
    at_p, at_d = (m.tokens_computed - b for m, b in zip(models, before, strict=True))
    return at_p, at_d


@pytest.mark.parametrize(
    ("pd_caching", "computed"), [(0, 29), (1, 9), (2, 9), (3, 4)], ids=PD_CACHINGS
)
@pytest.mark.parametrize("mix", list(MIXES))
def test_what_the_prompts_side_computes_of_a_second_turn(
    mix: str, pd_caching: PdCaching, computed: int
) -> None:
    """Of 20 + 6 + 3 tokens: all, without the first prompt, without the first answer too.

    The last token of an answer is computed by nobody.
    """
    at_p, at_d = second_turn(cluster_of(mix, pd_caching=pd_caching))
    assert (at_p, at_d) == (computed, 3)


@pytest.mark.parametrize("pd_caching", PD_CACHINGS)
def test_what_crosses_for_a_second_turn(pd_caching: PdCaching) -> None:
    """Where the other side caches too, only what is new."""
    cluster = cluster_of("full", pd_caching=pd_caching)
    rows: list[int] = []
    copy = cluster.copy

    def counted(name: str, index: int, count: int) -> None:
        for copying in cluster.instances[name].copying.values():
            if name == "d":
                rows.append(len(copying.rows))
        copy(name, index, count)

    cluster.copy = counted  # type: ignore[method-assign]
    second_turn(cluster)
    whole, cached = 8, 2
    assert rows == [5, whole if pd_caching < 2 else cached]


@pytest.mark.parametrize("mix", list(MIXES))
def test_whoever_watches_the_index_hears_of_texts_that_came_from_elsewhere(mix: str) -> None:
    """A router that trusted notices alone would not know of them."""
    cluster = cluster_of(mix, pd_caching=3)
    cores = {name: cluster.instances[name].core for name in "pd"}
    watches = {
        name: partial(IndexWatch, cast(HoldingCore, core.memory)) for name, core in cores.items()
    }
    for name, core in cores.items():
        assert core.watch_index(watches[name]) == []
    first = Entry(prompt_of(1, 20), 6, "")
    cluster.submit("one", first, "p", "d")
    cluster.settle()
    text = np.asarray([*first.prompt, *first.emitted], np.int32)
    for name, core in cores.items():
        notice = core.watch_index(watches[name])[-1]
        assert isinstance(notice, IndexNotice) and notice.is_whole
        told = {(one.group, block) for one in notice.changes for block in one.hashes}
        for number, spec in enumerate(indexed_groups(core.memory.layout.groups)):
            if spec.kind == "full":
                chain, size = BlockHashes(spec.block_tokens, "", ""), spec.block_tokens
                ends = range(size, 25 - 25 % size + 1, size)
                assert {(number, chain.up_to(text[:end])) for end in ends} <= told, name


def test_a_history_goes_back_past_an_instance_that_the_request_left() -> None:
    cluster = cluster_of(pd_caching=3)
    entry = Entry(prompt_of(1, 20), 12, "")
    cluster.submit("r", entry, "p", "d")
    while cluster.moved < 1 or len(entry.emitted) < 4:
        turn(cluster)
    cluster.migrate("r", "e")
    cluster.settle()
    assert (cluster.moved, entry.at) == (2, "e")
    again = Entry([*entry.prompt, *entry.emitted, 1], 1, "")
    before = cluster.instances["p"].model.tokens_computed
    cluster.submit("s", again, "p", "")
    cluster.settle()
    cluster.check_ends()
    assert cluster.instances["p"].model.tokens_computed - before == 2


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("at", range(9))
def test_a_request_migrates_at_any_step(mix: str, at: int) -> None:
    """It goes on while it is copied, and computes no token twice."""
    cluster = cluster_of(mix)
    entry = Entry(prompt_of(1, 22), 14, "")
    cluster.submit("r", entry, "p", "")
    for _ in range(at):
        turn(cluster)
    cluster.migrate("r", "d")
    cluster.settle()
    cluster.check_ends()
    assert (cluster.moved, entry.at) == (1, "d")
    computed = [cluster.instances[name].model.tokens_computed for name in "pd"]
    assert sum(computed) == 22 + 13 and computed[1] > 0


def test_it_goes_on_while_it_is_copied_and_only_the_rest_is_waited_for() -> None:
    cluster = cluster_of("full")
    entry = Entry(prompt_of(1, 40), 15, "")
    cluster.submit("r", entry, "p", "")
    for _ in range(4):
        turn(cluster)
    cluster.migrate("r", "d")
    sizes: list[int] = []
    emitted = len(entry.emitted)
    for _ in range(4):  # the copy is offered, and takes its time
        while cluster.messages:
            cluster.deliver(0)
        cluster.step("p")
    sizes += [len(one.rows) for one in cluster.instances["d"].copying.values()]
    assert len(entry.emitted) == emitted + 4
    while not cluster.moved:
        for name in NAMES:
            cluster.copy(name, 0, 99)
        while cluster.messages:
            cluster.deliver(0)
        sizes += [len(one.rows) for one in cluster.instances["d"].copying.values()]
    assert len(sizes) == 2 and sizes[0] >= 10 > 3 >= sizes[1], "all of it, then the delta"
    cluster.settle()
    cluster.check_ends()


@pytest.mark.parametrize("dies", ["p", "d"])
@pytest.mark.parametrize("after", range(7))
def test_a_death_during_a_migration_loses_nothing(dies: str, after: int) -> None:
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 30), 12, "")
    cluster.submit("r", entry, "p", "")
    for _ in range(4):
        turn(cluster)
    cluster.migrate("r", "d")
    stumble(cluster, after)
    cluster.crash(dies)
    cluster.settle()
    cluster.check_ends()
    assert entry.end is not None and entry.end.reason == "length"


def test_a_request_that_waits_leaves_once_it_decodes() -> None:
    cluster = cluster_of(seats=1)
    first, second = Entry(prompt_of(1, 10), 6, ""), Entry(prompt_of(2, 10), 6, "")
    cluster.submit("first", first, "p", "")
    cluster.submit("second", second, "p", "")
    cluster.step("p")
    cluster.migrate("second", "d")
    cluster.settle()
    cluster.check_ends()
    assert (first.at, second.at) == ("p", "d")


def test_where_the_other_has_no_room_it_stays() -> None:
    cluster = cluster_of(large=20)
    cluster.submit("blocker", Entry(prompt_of(2, 40), 15, ""), "d", "")
    cluster.step("d")
    entry = Entry(prompt_of(1, 40), 9, "")
    cluster.submit("r", entry, "p", "")
    for _ in range(4):
        cluster.step("p")
    cluster.migrate("r", "d")
    cluster.settle()
    cluster.check_ends()


def test_prompts_that_left_are_kept_in_the_buffer_where_they_were_computed() -> None:
    """The pool of the prefill instance holds one of them; the next turn of each is a hit."""
    extras = Extras(buffer=60, seed=2)
    cluster = cluster_of("full", large=12, pd_caching=1, extras=extras)
    texts = [prompt_of(family, 40) for family in range(4)]
    for turn_number in range(2):
        for number, text in enumerate(texts):
            entry = Entry([*text, 1, 2, 3] if turn_number else text, 4, "")
            cluster.submit(f"{turn_number}/{number}", entry, "p", "d")
            cluster.settle()
    computed_at = cluster.instances["p"].core.stats()
    assert computed_at.rungs["cache_out"] > 0
    assert computed_at.buffer["cache_hit_tokens"] > 0
    cluster.check_ends()
    assert cluster.moved == 2 * len(texts)


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("goes_to", ["", "d"])
def test_a_third_instances_prefix_is_pulled_and_not_computed(mix: str, goes_to: str) -> None:
    cluster = cluster_of(mix)
    known = Entry(prompt_of(1, 30), 5, "")
    cluster.submit("known", known, "e", "")
    cluster.settle()
    entry = Entry([*known.prompt, *known.emitted, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", goes_to, pulls_from="e")
    assert not cluster.works("p")
    cluster.settle()
    cluster.check_ends()
    computed = [cluster.instances[name].model.tokens_computed for name in "pd"]
    assert computed == ([4, 3] if goes_to else [4 + 3, 0])


@pytest.mark.parametrize("after", range(5))
def test_a_request_does_without_what_does_not_come(after: int) -> None:
    """The instance that was asked has nothing, or dies, or messages are lost."""
    cluster = cluster_of()
    if after:
        cluster.submit("known", Entry(prompt_of(1, 30), 5, ""), "e", "")
        cluster.settle()
    entry = Entry(prompt_of(1, 34), 4, "")
    cluster.submit("r", entry, "p", "d", pulls_from="e")
    for moment in range(after):
        if cluster.messages:
            cluster.deliver(0, loses=moment == 2)
        cluster.copy("p", 0, 2)
    if after:
        cluster.crash("e")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == (after < 3), "the third message was about its way to d"


@pytest.mark.parametrize("begun", [False, True])
def test_a_draining_instance_takes_no_request_in(begun: bool) -> None:
    """What had room there before goes on there; whatever is announced later stays."""
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 20), 8, "")
    cluster.submit("r", entry, "p", "d" if begun else "")
    if begun:
        while cluster.messages:  # it has room
            cluster.deliver(0)
    drained = cluster.instances["d"]
    cluster.hear(drained, drained.engine.on_entry(Draining()))
    if not begun:
        for _ in range(4):
            cluster.step("p")
        cluster.migrate("r", "d")
    cluster.settle()
    cluster.check_ends()
    assert entry.at == ("d" if begun else "p")


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
    comes = len(receiver.core.pool.agent.receiving) > 0  # type: ignore[attr-defined]
    cluster.hear(receiver, receiver.engine.tell(Cancel(RequestId(NAME), attempt)))
    cluster.copy("d", 0, 99)
    assert len(receiver.core.running) == 0 and not receiver.core.has_work
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


TEXT = SamplingParams(temperature=0)
ROWS = ((2, 3, 3),)


def request_of(params: SamplingParams = TEXT, **more: Any) -> Request:
    return Request(spec_of([1, 2, -3, -3, -3, 4], params, **more), 0, 9, "")


@pytest.mark.parametrize(
    "groups",
    [
        [group(4, 2)],
        [group(4, 2), group(4, 1, window=9), group(4, 1, window=Chunk(8)), state(1, 2)],
        [group(4, 2), images(GroupKind.CROSS, 4, 2)],
        [group(4, 2), images(GroupKind.VISION, 4, 2)],
        [replace(group(4, 2), holds_embeddings=True)],
        [group(4, 2), replace(group(4, 2), is_draft=True)],
    ],
)
def test_requests_move_with_their_images_and_without(groups: list[GroupSpec]) -> None:
    assert staying_reason(request_of(), groups) == ""
    assert staying_reason(request_of(images=ROWS), groups) == ""


@pytest.mark.parametrize(
    ("request_", "groups", "reason"),
    [
        (request_of(), [group(4, 2), dropping(4, 2, 12)], "pages that cannot be moved"),
        (request_of(replace(TEXT, prompt_logprobs=1)), [group(4, 2)], "its prompt logprobs"),
        (request_of(pooling="last"), [group(4, 2)], "it generates no tokens"),
        (
            request_of(images=ROWS),
            [replace(group(4, 2), counts_images=True)],
            "its pages hold images among the text",
        ),
    ],
)
def test_what_stays_has_its_reason(request_: Request, groups: list[GroupSpec], reason: str) -> None:
    assert reason in staying_reason(request_, groups)


def test_only_groups_of_its_own_model_decide() -> None:
    other = replace(dropping(4, 2, 12), model="other")
    assert staying_reason(request_of(), [group(4, 2), other]) == ""
    assert staying_reason(request_of(model="other"), [group(4, 2), other]) != ""
    mixed = replace(group(4, 2), counts_images=True)
    assert staying_reason(request_of(), [mixed]) == "", "text alone moves"

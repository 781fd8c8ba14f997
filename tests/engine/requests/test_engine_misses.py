"""Why prompts missed: the reasons, and what is always true of them."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import eq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.core.miss_watch import (
    MARKS,
    MissLog,
    marks_within,
    prefix_digests,
)
from kvell.engine.protocol.pages import Miss
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.request import Request
from kvell.vocabulary import RequestId

FIRST_MARK = MARKS[0][0]


def tokens_of(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(values, np.int32)


def text(length: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Different texts for different seeds, from the first token on."""
    return (np.arange(length, dtype=np.int32) * 7 + seed * 1000) % 50_000


def never_asked() -> bool:
    raise AssertionError("nothing was seen, so nobody needs to look")


def none_asked() -> Mapping[str, int]:
    raise AssertionError("nothing was seen, so nobody needs to look")


def reaching(**lengths: int) -> Callable[[], Mapping[str, int]]:
    return lambda: lengths


class Story:
    """A log that is told of one admission per step."""

    def __init__(self, most_seen: int = 10_000, most_misses: int = 64) -> None:
        self.log = MissLog(most_seen, most_misses)
        self.step = 0

    def admit(
        self,
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
        hit: int = 0,
        *,
        root: str = "",
        model: str = "",
        computing: Callable[[], bool] = never_asked,
        reaches: Callable[[], Mapping[str, int]] = none_asked,
        steps: int = 1,
    ) -> Miss | None:
        """The miss of this admission; None if it is none."""
        self.step += steps
        name = RequestId(f"r{self.step}")
        spec = RequestSpec(name, to_token_bytes(tokens), SamplingParams(), model=model)
        request = Request(spec, 0, 1, root, cached_tokens=hit)
        self.log.on_admitted(request, self.step, computing, reaches)
        latest = self.log.latest
        return latest[-1] if latest and latest[-1].request_id == name else None


def found(miss: Miss | None) -> Miss:
    assert miss is not None
    return miss


def test_a_first_prompt_was_never_seen() -> None:
    miss = found(Story().admit(text(200)))
    assert (miss.reason, miss.seen_tokens, miss.steps_ago) == ("never_seen", 0, 0)
    assert (miss.prompt_tokens, miss.hit_tokens, miss.step) == (200, 0, 1)


def test_a_prompt_that_was_hit_as_far_as_it_was_seen_is_new_behind_that() -> None:
    story = Story()
    story.admit(text(128))
    miss = found(story.admit(np.concatenate([text(128), text(90, 1)]), hit=128))
    assert (miss.reason, miss.seen_tokens) == ("never_seen", 128)


def test_a_prompt_that_was_hit_up_to_its_last_mark_is_no_miss() -> None:
    story = Story()
    story.admit(text(130))
    assert story.admit(text(130), hit=128) is None


def test_the_last_token_is_always_computed_and_so_never_missed() -> None:
    story = Story()
    story.admit(text(129))
    assert story.admit(text(129), hit=128) is None
    assert story.admit(text(128), hit=127) is None


def test_what_no_group_has_any_more_was_evicted_some_steps_after_it_was_seen() -> None:
    story = Story()
    story.admit(text(300))
    miss = found(
        story.admit(
            text(300), 64, computing=lambda: False, reaches=reaching(full=64, window=64), steps=41
        )
    )
    assert (miss.reason, miss.steps_ago, miss.seen_tokens) == ("evicted", 41, 256)
    assert miss.groups == ()


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ({"full": 299, "window": 0, "state": 128}, ("window", "state")),
        ({"full": 299, "state": 299}, ()),
    ],
)
def test_groups_that_lack_it_are_named_if_others_have_it(
    lengths: dict[str, int], named: tuple[str, ...]
) -> None:
    """Those that can only go on at different lengths are not blamed one by one."""
    story = Story()
    story.admit(text(300))
    reaches = reaching(**lengths)
    miss = found(story.admit(text(300), computing=lambda: False, reaches=reaches))
    assert (miss.reason, miss.groups) == ("not_resumable", named)


def test_what_another_request_is_computing_is_neither_evicted_nor_unseen() -> None:
    story = Story()
    story.admit(text(300))
    miss = found(story.admit(text(300), computing=lambda: True))
    assert (miss.reason, miss.seen_tokens) == ("being_computed", 256)


def test_another_salt_is_told_of_but_not_named() -> None:
    story = Story()
    story.admit(text(300), root="tenant-secret")
    miss = found(story.admit(text(300), root="mine"))
    assert (miss.reason, miss.seen_tokens, miss.steps_ago) == ("other_salt", 256, 1)
    assert "tenant-secret" not in repr(miss)


def test_what_ones_own_salt_has_counts_before_what_others_have() -> None:
    story = Story()
    story.admit(text(300), root="mine")
    story.admit(text(300), root="other")
    miss = found(
        story.admit(text(300), root="mine", computing=lambda: False, reaches=reaching(full=0))
    )
    assert miss.reason == "evicted"


def test_a_longer_prefix_under_another_salt_is_the_reason_beyond_ones_own_hit() -> None:
    story = Story()
    story.admit(text(64), root="mine")
    story.admit(text(300), root="other")
    miss = found(story.admit(text(300), 64, root="mine"))
    assert (miss.reason, miss.seen_tokens) == ("other_salt", 256)


def test_models_share_no_prefix() -> None:
    story = Story()
    story.admit(text(300), model="a")
    assert found(story.admit(text(300), model="b")).reason == "never_seen"


def test_the_answer_belongs_to_what_was_seen_once_a_request_has_ended() -> None:
    story = Story()
    story.admit(text(64))
    turn = np.concatenate([text(64), text(64, 3)])
    story.log.on_ended(turn, "", "", 2)
    story.step = 4
    longer = np.concatenate([turn, text(40, 4)])
    miss = found(
        story.admit(longer, 64, computing=lambda: False, reaches=reaching(full=64, window=64))
    )
    assert (miss.reason, miss.seen_tokens, miss.steps_ago) == ("evicted", 128, 3)


def test_only_the_latest_misses_are_kept() -> None:
    story = Story(most_misses=3)
    for seed in range(5):
        story.admit(text(40, seed))
    assert [miss.step for miss in story.log.latest] == [3, 4, 5]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    story = Story(most_seen=8)  # four marks, each twice
    story.admit(text(FIRST_MARK * 4 + 1))
    story.admit(text(FIRST_MARK * 1 + 1, 5))  # takes the places of two of them
    reaches = reaching(full=0)
    again = found(story.admit(text(FIRST_MARK * 4 + 1), computing=lambda: False, reaches=reaches))
    assert FIRST_MARK <= again.seen_tokens < FIRST_MARK * 4


@pytest.mark.parametrize(
    ("length", "count", "last"),
    [(0, 0, 0), (15, 0, 0), (16, 1, 16), (300, 16, 256), (320, 17, 320)],
)
def test_marks_lie_closer_together_near_the_beginning(length: int, count: int, last: int) -> None:
    marks = marks_within(length)
    assert (len(marks), marks[-1] if marks else 0) == (count, last)


def test_a_prompt_of_8192_tokens_has_92_marks() -> None:
    assert len(marks_within(8192)) == 92


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_marks_of_a_longer_prompt_begin_with_those_of_a_shorter_one(one: int, other: int) -> None:
    short, long = sorted((one, other))
    marks = marks_within(long)
    assert marks == sorted(set(marks)) and all(0 < mark <= long for mark in marks)
    assert marks_within(short) == [mark for mark in marks if mark <= short]


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_digests_are_equal_exactly_as_far_as_the_texts_are(
    one: list[int], other: list[int]
) -> None:
    shared = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    marks = range(1, min(len(one), len(other)) + 1)
    left = prefix_digests(tokens_of(*one), "m", marks)
    right = prefix_digests(tokens_of(*other), "m", marks)
    assert [a == b for a, b in zip(left, right, strict=True)] == [mark <= shared for mark in marks]


prompts = st.builds(
    lambda stem, length, tail: np.concatenate([text(length, stem), text(tail, 9)]),
    st.integers(0, 2),
    st.integers(1, 400),
    st.integers(0, 60),
)


@given(
    st.lists(
        st.tuples(prompts, st.sampled_from(["", "a", "b"]), st.floats(0, 1), st.integers(0, 2)),
        max_size=40,
    ),
    st.integers(0, 60),
)
def test_every_miss_is_of_something_and_the_record_stays_bounded(
    admissions: list[tuple[np.ndarray[tuple[int], np.dtype[np.int32]], str, float, int]],
    most_seen: int,
) -> None:
    story = Story(most_seen, most_misses=7)
    for tokens, root, part, reach in admissions:
        hit = int(part * (len(tokens) - 1))
        reaches = reaching(full=hit, window=len(tokens) if reach else hit)
        miss = story.admit(tokens, hit, root=root, computing=partial(eq, reach, 2), reaches=reaches)
        assert len(story.log.seen) <= most_seen
        assert len(story.log.latest) <= 7
        last = marks_within(len(tokens) - 1)[-1:] or [0]
        assert (miss is not None) == (last[0] > hit)
        if miss is None:
            continue
        assert miss.hit_tokens < miss.prompt_tokens and miss.seen_tokens < miss.prompt_tokens
        assert miss.steps_ago < story.step and (miss.steps_ago > 0) == (miss.seen_tokens > 0)
        assert (miss.seen_tokens > hit) == (miss.reason != "never_seen")
        assert bool(miss.groups) <= (miss.reason == "not_resumable")


@given(st.lists(st.tuples(prompts, st.sampled_from(["", "a"])), max_size=20), prompts)
def test_what_is_seen_is_what_a_plain_record_of_all_prompts_says(
    earlier: list[tuple[np.ndarray[tuple[int], np.dtype[np.int32]], str]],
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> None:
    story = Story()
    for other, root in earlier:
        story.admit(other, root=root, computing=lambda: False, reaches=reaching(full=0))
    miss = story.admit(tokens, computing=lambda: False, reaches=reaching(full=0))
    if miss is None:
        return

    def longest(roots: set[str]) -> int:
        fitting = [
            mark
            for mark in marks_within(len(tokens) - 1)
            for other, root in earlier
            if root in roots and mark <= len(other) and np.array_equal(other[:mark], tokens[:mark])
        ]
        return max(fitting, default=0)

    own, anyone = longest({""}), longest({"", "a"})
    expected = ("evicted", own) if own else ("other_salt", anyone) if anyone else ("never_seen", 0)
    assert (miss.reason, miss.seen_tokens) == expected


def test_every_miss_is_counted_by_its_reason_and_every_reason_is_there() -> None:
    story = Story(most_misses=2)
    for seed in range(5):
        story.admit(text(200, seed))
    story.admit(text(200), computing=lambda: True)
    assert story.log.counts == {
        "never_seen": 5,
        "other_salt": 0,
        "being_computed": 1,
        "evicted": 0,
        "not_resumable": 0,
    }
    assert len(story.log.latest) == 2, "only the latest are kept one by one"

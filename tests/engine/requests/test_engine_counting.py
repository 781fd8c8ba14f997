"""Counters by size and by position."""

from kvell.engine.requests.counting import (
    STEP_TOKENS_BUCKETS,
    DraftTokens,
    StepSizes,
    TeamCounts,
)
from kvell.engine.requests.plan import TeamTime


def test_a_step_is_counted_in_the_smallest_bucket_that_holds_it() -> None:
    sizes = StepSizes()
    for tokens in (1, 2, 8, 9, 16_384, 16_385):
        sizes.add(tokens)
    found = sizes.by_size()
    assert len(found) == len(STEP_TOKENS_BUCKETS) + 1
    assert found[:3] == (1, 2, 1)
    assert found[-2:] == (1, 1)
    assert sum(found) == 6
    assert sizes.tokens == 1 + 2 + 8 + 9 + 16_384 + 16_385


def test_nothing_was_drafted_yet() -> None:
    draft_tokens = DraftTokens()
    draft_tokens.add(0, 0)
    assert (draft_tokens.drafts, draft_tokens.draft_tokens, draft_tokens.accepted_tokens) == (
        0,
        0,
        0,
    )
    assert draft_tokens.accepted_by_position() == ()


def test_right_draft_tokens_are_counted_by_their_place() -> None:
    draft_tokens = DraftTokens()
    draft_tokens.add(2, 2)
    draft_tokens.add(4, 1)
    draft_tokens.add(3, 0)
    assert draft_tokens.drafts == 3
    assert draft_tokens.draft_tokens == 9
    assert draft_tokens.accepted_by_position() == (2, 1, 0, 0)
    assert draft_tokens.accepted_tokens == 3


def test_a_team_is_counted_from_its_first_step() -> None:
    team = TeamCounts()
    team.add(None)
    assert team.figures() == {}
    team.add(TeamTime(2, True, 4.0, 1.5))
    team.add(None)
    team.add(TeamTime(1, False, 1.0, 0.25))
    assert team.figures() == {
        "threads": 1,
        "shared": 0,
        "thread_seconds": 5.0,
        "lost_seconds": 1.75,
    }

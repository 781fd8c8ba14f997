"""Token dropping, and drafters that are found in part."""

from dataclasses import replace

from tests.pages.pools import dropping, group, pool_of
from tests.prefix.mixes import drafter, text
from tests.prefix.rehearsal import Rehearsal
from tests.prefix.story import ints

SHORT = text(*range(10))
LONG = text(*range(30))


def test_a_prompt_within_the_budget_is_shared_like_any() -> None:
    rehearsal = Rehearsal(pool_of(40, dropping(4, 2, 12)))
    assert rehearsal.finish(SHORT) == 0
    assert rehearsal.finish(text(*range(10), 5, 5)) == 10


def test_a_prompt_beyond_the_budget_drops_once_it_is_computed() -> None:
    rehearsal = Rehearsal(pool_of(40, dropping(4, 2, 12)))
    request = rehearsal.serve(LONG, 29)
    assert len(rehearsal.pages(request)[0]) == 8
    rehearsal.reach(request, 30)
    assert len(rehearsal.pages(request)[0]) == 3, "12 tokens"
    rehearsal.append([request], 7)
    rehearsal.reach(request, 31)
    assert len(rehearsal.pages(request)[0]) == 4


def test_what_will_be_dropped_is_named_nowhere() -> None:
    rehearsal = Rehearsal(pool_of(40, dropping(4, 2, 12), group(4, 2)))
    request = rehearsal.serve(LONG, 20)
    assert rehearsal.check().index == ()
    rehearsal.reach(request, 30)
    rehearsal.close(request, renew=True)
    assert rehearsal.check().index == ()


def test_a_prompt_that_drops_copies_what_it_hits() -> None:
    """It will move tokens about in these pages, so they must be its own."""
    rehearsal = Rehearsal(pool_of(40, dropping(4, 2, 12)))
    other = rehearsal.serve(SHORT, 10)
    request = rehearsal.open(LONG, "", "")
    assert rehearsal.core.hit_tokens(request.handle) == 8
    rehearsal.reach(request, 20)
    shared = set(rehearsal.pages(other)[0].values()) & set(rehearsal.pages(request)[0].values())
    assert not shared
    rehearsal.reach(request, 30)
    rehearsal.close(request, renew=True)
    rehearsal.close(other, renew=True)
    assert rehearsal.peek(text(*range(10), 77)) == 10, "the source is as it was"


def test_what_memory_allows_never_goes_past_the_end_of_such_a_prompt() -> None:
    rehearsal = Rehearsal(pool_of(40, dropping(4, 2, 12)))
    request = rehearsal.open(LONG, "", "", generated=(1, 2, 3))
    assert rehearsal.core.largest(request.handle, 33) == 30
    rehearsal.reach(request, 30)
    assert rehearsal.core.largest(request.handle, 33) == 33


def test_a_request_that_begins_again_drops_from_its_prompt_only() -> None:
    rehearsal = Rehearsal(pool_of(40, dropping(4, 2, 12)))
    request = rehearsal.open(SHORT, "", "", generated=range(100, 108))
    rehearsal.reach(request, 18)
    assert len(rehearsal.pages(request)[0]) == 5, "10 are within the budget: all 18 stay"


def test_the_peak_of_a_dropping_prompt_is_its_whole_length() -> None:
    rehearsal = Rehearsal(pool_of(7, dropping(4, 1, 12)))
    nobody = ints()
    fitting = rehearsal.open(text(*range(28)), "", "")
    assert rehearsal.core.fits(fitting.handle, 28, 4, nobody, nobody)
    longer = rehearsal.open(LONG, "", "")
    assert not rehearsal.core.fits(longer.handle, 30, 4, nobody, nobody)


def test_a_drafter_shortens_no_hit_and_takes_what_there_is() -> None:
    """The drafter's pages go first here; what is left of them is taken, the rest refilled."""
    layout = pool_of(40, group(4, 2), drafter(group(4, 2)))
    rehearsal = Rehearsal(layout)
    rehearsal.finish(text(*range(20)))
    request = rehearsal.serve(text(*range(20), 5), 21)
    assert rehearsal.core.hit_tokens(request.handle) == 20
    assert sorted(rehearsal.pages(request)[1]) == list(range(6))


def test_a_drafter_that_lost_its_pages_is_refilled_and_found_again() -> None:
    """Twelve large pages: ten are cached; a newcomer of its own group evicts the drafter's."""
    required, spare = group(4, 1), replace(group(4, 1, 5), required_for_hit=False)
    rehearsal = Rehearsal(pool_of(12, required, spare))
    rehearsal.finish(text(*range(20)))
    other = rehearsal.serve(text(*range(300, 312)), 12)
    rehearsal.close(other, renew=False)
    left = sum(1 for e in rehearsal.check().index if e.group == 1 and e.end <= 20)
    assert left < 10
    request = rehearsal.serve(text(*range(20), 5), 21)
    assert rehearsal.core.hit_tokens(request.handle) >= 16
    rehearsal.close(request, renew=True)
    assert rehearsal.peek(text(*range(20), 5, 6)) == 21


def test_hits_of_a_drafter_are_not_counted() -> None:
    rehearsal = Rehearsal(pool_of(40, group(4, 2), drafter(group(4, 2))))
    rehearsal.finish(text(*range(20)))
    rehearsal.finish(text(*range(20), 5))
    assert rehearsal.core.totals().group_hit_tokens == (20, 0)

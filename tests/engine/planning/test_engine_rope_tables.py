"""Two rotation tables: a text has the keys of the table for its length, whatever is beside it."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.moving.handovers import handed_over_root
from kvell.engine.requests.cache_roots import LONG, cache_root, long_root
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from tests.depth import some
from tests.engine.conftest import make_layout
from tests.engine.traffic import Traffic, limits
from tests.engine.virtual_model import expected_output

SHORT = 20
LONG_PROMPT = [3 + index % 7 for index in range(30)]


def two_tables(batched: int = 16, depth: int = 0, drafts: int = 0) -> Limits:
    """Limits of a model whose texts of up to ``SHORT`` tokens have keys of their own."""
    return replace(
        limits(batched=batched),
        short_rope_tokens=SHORT,
        depth=depth,
        num_speculative_tokens=drafts,
        prompt_lookup_min=1,
    )


def test_a_request_that_moves_keeps_its_table() -> None:
    for pd_caching in (0, 2):
        assert handed_over_root(long_root("salt"), pd_caching, "q").startswith(LONG)
        assert not handed_over_root("salt", pd_caching, "q").startswith(LONG)


def test_no_salt_is_a_root_of_the_long_table() -> None:
    imitation = long_root("salt")
    assert not cache_root(imitation, "q", is_scored=False).startswith(LONG)


class Deep(Traffic):
    """Traffic whose steps are planned before the results of earlier ones."""

    def run(self, most_steps: int = 400) -> None:
        in_flight: deque[StepPlan] = deque()
        for _ in range(most_steps):
            while self.core.may_plan:
                in_flight.append(self.plan())
            if not in_flight:
                break
            self.finish_step(in_flight.popleft())
        super().run(0)


def test_a_text_that_outgrows_the_short_table_is_computed_again() -> None:
    traffic = Traffic(make_layout(), two_tables())
    traffic.submit("a", LONG_PROMPT[:15], max_tokens=10)
    traffic.run()
    assert traffic.finished("a").preemptions == 1
    work = [w for plan in traffic.plans for w in plan.work]
    assert max(w.start + w.count for w in work if not w.uses_long_rope) == SHORT
    assert [(w.start, w.count) for w in work if w.uses_long_rope][:2] == [(0, 16), (16, 5)]


def test_prefixes_of_different_tables_are_different_prefixes() -> None:
    traffic = Traffic(make_layout(), two_tables())
    for name, size in (("long", 30), ("short", 16), ("longer", 29), ("shorter", 17)):
        traffic.submit(name, LONG_PROMPT[:size], max_tokens=3)
        traffic.run()
    hits = {name: traffic.finished(name).cached_tokens for name in traffic.prompts}
    assert hits == {"long": 0, "short": 0, "longer": 28, "shorter": 16}


@pytest.mark.parametrize(("depth", "drafts"), [(0, 0), (1, 0), (0, 3)])
@some()
@given(
    prompts=st.lists(st.integers(1, 34), min_size=1, max_size=6),
    num_large=st.integers(18, 40),
    batched=st.integers(5, 24),
)
def test_answers_do_not_depend_on_neighbours_chunks_or_preemptions(
    depth: int, drafts: int, prompts: list[int], num_large: int, batched: int
) -> None:
    """The virtual model compares all that a token reads with the text under its table."""
    chosen = two_tables(batched, depth, drafts)
    traffic = Deep(make_layout((0, 9), num_large), chosen)
    for index, size in enumerate(prompts):
        traffic.submit(f"q{index}", LONG_PROMPT[:size], max_tokens=12)
    traffic.run()
    for name, prompt in traffic.prompts.items():
        output = traffic.tokens(name)
        assert len(output) == 12 or traffic.finished(name).reason == "refused"
        assert output == expected_output(prompt, len(output), short_rope_tokens=SHORT)

"""The cost of copies, measured between steps."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.core.engine_stats import LEAST_SECTIONS, LEAST_STEPS, CopyCost


class Steps:
    def __init__(self) -> None:
        self.cost = CopyCost()
        self._copied = 0

    def take(
        self,
        milliseconds: int,
        sections: int = 0,
        count: int = 1,
        *,
        is_decode: bool = True,
        is_copying: bool = False,
    ) -> None:
        for _ in range(count):
            self._copied += sections
            self.cost.on_step(
                milliseconds / 1000,
                is_decode=is_decode,
                copied=self._copied,
                is_copying=is_copying,
            )


@given(
    step=st.integers(1, 400),
    added=st.integers(0, 100),
    copies=st.lists(st.integers(1, 5), min_size=LEAST_SECTIONS, max_size=60),
)
def test_what_a_section_adds_to_each_step_is_found(
    step: int, added: int, copies: list[int]
) -> None:
    steps = Steps()
    steps.take(step, count=LEAST_STEPS)
    for sections in copies:
        steps.take(step + added * sections, sections)
        steps.take(step)
    found = steps.cost.section_seconds
    assert found is not None and abs(found - added / 1000) < 1e-6


def test_nothing_is_reported_before_it_is_measured() -> None:
    steps = Steps()
    steps.take(20, sections=1, count=LEAST_SECTIONS)
    steps.take(20, count=LEAST_STEPS)
    assert steps.cost.section_seconds is None


def test_a_copy_over_several_steps_counts_with_all_of_them() -> None:
    steps = Steps()
    steps.take(20, count=LEAST_STEPS)
    for _ in range(LEAST_SECTIONS):
        steps.take(24, is_copying=True)
        steps.take(24, is_copying=True)
        steps.take(24, sections=1)
    assert steps.cost.section_seconds is not None
    assert abs(steps.cost.section_seconds - 3 * 0.004) < 1e-6


def test_steps_with_prompts_are_no_usual_steps() -> None:
    steps = Steps()
    steps.take(20, count=LEAST_STEPS)
    steps.take(500, is_decode=False)
    steps.take(500, sections=2, is_decode=False)
    for _ in range(LEAST_SECTIONS):
        steps.take(25, sections=1)
    assert steps.cost.section_seconds is not None
    assert abs(steps.cost.section_seconds - 0.005) < 1e-6


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 4), st.booleans()), max_size=80))
def test_the_cost_is_never_negative(drawn: list[tuple[int, int, bool]]) -> None:
    steps = Steps()
    for ticks, sections, is_decode in drawn:
        steps.take(ticks, sections, is_decode=is_decode)
        assert steps.cost.section_seconds is None or steps.cost.section_seconds >= 0

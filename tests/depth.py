"""How deep property tests search: one scale for all of them.

``--depth`` is 0.2 in the fast suite, 1 in ``make test-long``, and more for a night.  A test picks
one of the kinds below by what an example costs; it never says a number of its own.
"""

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

DEFAULT = 0.2
DEEP_EXAMPLES = 100
MOST_SEARCHES = 20

_depth = DEFAULT


def set_depth(depth: float) -> None:
    """Set the scale; before test modules are imported."""
    global _depth  # noqa: PLW0603 - decorators read it when modules are imported
    _depth = depth


def scaled(count: int) -> int:
    """A number of cases at the scale, at least one."""
    return max(1, round(count * _depth))


def few() -> settings:
    """For examples of a tenth of a second and more."""
    return _settings(25)


def some() -> settings:
    """For examples of some ten milliseconds, and for what says nothing."""
    return _settings(100)


def many() -> settings:
    """For examples of a millisecond and less."""
    return _settings(500)


def machine(steps: int = 50, weight: float = 1.0) -> settings:
    """For state machines.

    :param steps: of an example, at most.
    :param weight: of this machine's examples beside those of others.
    """
    return settings(_settings(round(200 * weight)), stateful_step_count=steps)


def search_until_all(
    sought: type[RuleBasedStateMachine], depth: settings, missing: Callable[[], Collection[Any]]
) -> None:
    """Run a state machine; a deep search again and again, until no case is missing.

    :raises AssertionError: if a deep search ends while some are.
    """
    is_deep = depth.max_examples >= DEEP_EXAMPLES
    for _ in range(MOST_SEARCHES if is_deep else 1):
        run_state_machine_as_test(sought, settings=depth)
        if not missing():
            return
    assert not is_deep, missing()


def _settings(count: int) -> settings:
    return settings(
        max_examples=scaled(count), deadline=None, suppress_health_check=list(HealthCheck)
    )

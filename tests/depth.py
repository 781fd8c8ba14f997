"""How deep property tests search: one scale for all of them.

``--depth`` is 0.2 in the fast suite, 1 in ``make test-long``, and more for a night.  A test picks
one of the kinds below by what an example costs; it never says a number of its own.
"""

from hypothesis import HealthCheck, settings

DEFAULT = 0.2

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


def _settings(count: int) -> settings:
    return settings(
        max_examples=scaled(count), deadline=None, suppress_health_check=list(HealthCheck)
    )

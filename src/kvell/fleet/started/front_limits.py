"""Bounds of a front."""

from dataclasses import dataclass, field

from kvell.fleet.started.supervisor import RestartPolicy


@dataclass(frozen=True)
class FrontLimits:
    """Bounds of a front.

    :param max_waiting: requests of one tenant that may wait for a credit before new ones are
        refused; all tenants together may have less than twice as many.
    :param startup_seconds: an instance must be ready within this time.
    :param drain_seconds: time for running requests to end when an instance leaves; then another
        instance continues them or, when the server closes, they end with an error.
    :param silence_seconds: an instance that sends nothing for this long is killed.
    :param restart: how often and how soon a dead instance is started again.
    """

    max_waiting: int = 1024
    startup_seconds: float = 600.0
    drain_seconds: float = 30.0
    silence_seconds: float = 10.0
    restart: RestartPolicy = field(default_factory=RestartPolicy)

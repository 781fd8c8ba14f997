"""Clusters under drawn schedules of requests, losses, cuts and crashes."""

from hypothesis import given

from tests.depth import some
from tests.simulator.cluster.schedules import Run, Scenario, scenarios


@given(scenarios)
@some()
def test_whatever_happens_every_request_is_answered_rightly_or_refused(scenario: Scenario) -> None:
    Run(scenario).go()

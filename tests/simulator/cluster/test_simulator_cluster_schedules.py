"""Clusters under drawn schedules of requests, losses, cuts and crashes."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.simulator.cluster.schedules import Run, Scenario, scenarios

SOME = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@given(scenarios)
@settings(SOME)
def test_whatever_happens_every_request_is_answered_rightly_or_refused(scenario: Scenario) -> None:
    Run(scenario).go()


@pytest.mark.long
@given(scenarios)
@settings(SOME, max_examples=10_000)
def test_the_same_over_ten_thousand_schedules(scenario: Scenario) -> None:
    Run(scenario).go()

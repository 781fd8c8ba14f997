"""Rounds in turn: every scenario is done by all systems, each round in another order."""

from collections.abc import Callable, Mapping, Sequence

from bench.side_by_side.scenarios import Figures, Scenario
from bench.side_by_side.systems import System

Results = dict[str, dict[str, list[Figures]]]
"""Scenario to system to figures, round by round."""
Told = Callable[[str], None]


def order_of(round_number: int, names: Sequence[str]) -> list[str]:
    """Rotate the order by one each round, so that no system always runs first."""
    start = round_number % len(names)
    return [*names[start:], *names[:start]]


def alternated(
    systems: Mapping[str, System],
    scenarios: Sequence[Scenario],
    rounds: int,
    told: Told = lambda _doing: None,
    between: Callable[[], None] = lambda: None,
    *,
    first: int = 0,
) -> Results:
    """Run all rounds; all systems but the measured one are paused.

    :param between: called before each round, while all are paused.
    :param first: number of the first round, which gives seeds and order.
    """
    results: Results = {one.name: {} for one in scenarios}
    for system in systems.values():
        system.process.pause()
    for number in range(first, first + rounds):
        between()
        # One behind the other, so that what disturbs the machine for a second disturbs them all.
        for index, scenario in enumerate(scenarios):
            for name in order_of(number, list(systems)):
                told(f"round {number + 1}: {name}, {scenario.name}")
                seed = 1000 * (index + 1) + number
                figures = _asked(systems[name], scenario, seed)
                if figures is not None:
                    results[scenario.name].setdefault(name, []).append(figures)
    return {
        scenario: {name: found[name] for name in systems if name in found}
        for scenario, found in results.items()
    }


def joined(parts: Sequence[Results]) -> Results:
    """Rounds of several starts, one behind the other; all have the same scenarios."""
    whole: Results = {scenario: {} for scenario in parts[0]}
    for part in parts:
        for scenario, found in part.items():
            for name, figures in found.items():
                whole[scenario].setdefault(name, []).extend(figures)
    return whole


def _asked(system: System, scenario: Scenario, seed: int) -> Figures | None:
    system.process.resume()
    try:
        return system.run(scenario, seed)
    finally:
        system.process.pause()

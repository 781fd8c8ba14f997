"""Parts of a manager that tests look at."""

from kvell.fleet.manager.front_lines import FrontLine
from kvell.fleet.manager.manager import Manager
from kvell.fleet.manager.steered import FrontTable
from kvell.fleet.started.members import Members


def members_of(manager: Manager) -> Members:
    return manager._members


def fronts_of(manager: Manager) -> FrontTable:
    return manager._fronts


def lines_of(manager: Manager) -> dict[str, FrontLine]:
    return manager._lines._by_front


def loads_of(manager: Manager) -> dict[str, int]:
    """Return the loads that fronts have reported, as if no lease had expired."""
    return fronts_of(manager).loads(0.0)

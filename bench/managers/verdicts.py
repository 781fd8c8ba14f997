"""Clauses that must hold of the matrix, cell by cell; pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.managers.cells import IDEAL, OURS, Cell, is_refused

SELF = "kvell"
MOST_STEPS = 1.01
FEWER_STEPS = 0.97
ONE_PAGE_SIZE = ("paged", "max-page")
WAITS = 0.2
WON = 0.8
HIT_RATE_SLACK = 0.005
STEPS_SLACK = 1e-9

Outcome = Mapping[str, Any]
Place = tuple[str, str, int]
Results = Mapping[Cell, Outcome]


@dataclass(frozen=True)
class Comparison:
    """All managers on one shape, trace and memory size.

    :param kinds: of the shape's layers.
    """

    place: Place
    kinds: Sequence[str]
    outcomes: Mapping[str, Outcome]

    @property
    def name(self) -> str:
        """The comparison's name, for tables."""
        return ".".join(map(str, self.place))

    @property
    def complete(self) -> dict[str, Outcome]:
        """Managers that finished every request; those that did less are not comparable."""
        ran = {name: one for name, one in self.outcomes.items() if not is_refused(one)}
        return {name: one for name, one in ran.items() if not one["requests_refused"]}

    @property
    def others(self) -> dict[str, Outcome]:
        """Complete managers other than ours and the ideal."""
        return {name: one for name, one in self.complete.items() if name not in (SELF, IDEAL)}

    @property
    def one_page_size(self) -> dict[str, Outcome]:
        """Complete managers with one page size."""
        return {name: one for name, one in self.others.items() if name in ONE_PAGE_SIZE}

    @property
    def is_heterogeneous(self) -> bool:
        """Whether there are several kinds of layers."""
        return len(self.kinds) > 1


@dataclass(frozen=True)
class Verdict:
    """A clause, judged over the comparisons it applies to.

    :param missed: name and what was found, of every comparison in which it does not hold.
    :param required: part of them in which it must hold.
    """

    clause: str
    compared: int
    missed: Mapping[str, str]
    required: float = 1.0

    @property
    def part(self) -> float:
        """Part of the comparisons in which it holds."""
        return 1 - len(self.missed) / max(1, self.compared)

    @property
    def holds(self) -> bool:
        """Whether it holds in the required part, of at least one comparison."""
        return self.compared > 0 and self.part >= self.required


def comparisons(results: Results, kinds: Mapping[str, Sequence[str]]) -> list[Comparison]:
    """Comparisons by place, where all of our managers have a result."""
    by_place: dict[Place, dict[str, Outcome]] = {}
    for cell, outcome in results.items():
        by_place.setdefault(cell.place, {})[cell.manager] = outcome
    return [
        Comparison(place, kinds[place[0]], outcomes)
        for place, outcomes in sorted(by_place.items())
        if all(manager in outcomes for manager in OURS)
    ]


def verdicts(compared: Sequence[Comparison]) -> list[Verdict]:
    """Judge every clause."""
    short = [one for one in compared if one.is_heterogeneous and _waits(one)]
    return [
        _verdict("kvell runs every cell, and refuses nobody", compared, _ran),
        _verdict(f"steps ≤ {MOST_STEPS} × the best of the others", compared, _steps),
        _verdict(
            f"≥ 3 % fewer steps than paged and max-page, where layers differ and paged is short "
            f"of memory in ≥ {WAITS:.0%} of its steps",
            short,
            _fewer,
            WON,
        ),
        _verdict(
            "the same, of those in which a packer without pages has so few",
            [one for one in short if _could_be_fewer(one)],
            _fewer,
            WON,
        ),
        _verdict(f"hit rate ≥ the best − {HIT_RATE_SLACK}", compared, _hits),
        _verdict(
            "full attention only: the decisions of paged",
            [one for one in compared if list(one.kinds) == ["full"]],
            _same,
        ),
    ]


def _verdict(
    clause: str,
    compared: Iterable[Comparison],
    problem: Callable[[Comparison], str | None],
    required: float = 1.0,
) -> Verdict:
    asked = list(compared)
    found = {one.name: problem(one) for one in asked}
    missed = {name: what for name, what in found.items() if what is not None}
    return Verdict(clause, len(asked), missed, required)


def _waits(one: Comparison) -> bool:
    paged = one.outcomes["paged"]
    return not is_refused(paged) and bool(paged["short_of_memory"] >= WAITS)


def _ran(one: Comparison) -> str | None:
    ours = one.outcomes[SELF]
    if is_refused(ours):
        return str(ours["refused"])
    refused = ours["requests_refused"]
    return f"{refused} requests refused" if refused else None


def _steps(one: Comparison) -> str | None:
    return _against(one, MOST_STEPS, one.others)


def _fewer(one: Comparison) -> str | None:
    return _against(one, FEWER_STEPS, one.one_page_size)


def _could_be_fewer(one: Comparison) -> bool:
    """Whether the ideal is known, and far enough ahead of one page size."""
    ideal, others = one.complete.get(IDEAL), one.one_page_size.values()
    if ideal is None:
        return False
    return all(ideal["steps"] <= FEWER_STEPS * other["steps"] for other in others)


def _against(one: Comparison, most: float, others: Mapping[str, Outcome]) -> str | None:
    if SELF not in one.complete:
        return "not all requests"
    if not others:
        return None
    best = min(others, key=lambda name: others[name]["steps"])
    part = one.complete[SELF]["steps"] / others[best]["steps"]
    return f"{part:.4f} × {best}" if part > most + STEPS_SLACK else None


def _hits(one: Comparison) -> str | None:
    if SELF not in one.complete:
        return "not all requests"
    if not one.others:
        return None
    best = max(one.others, key=lambda name: one.others[name]["hit_rate"])
    behind = one.others[best]["hit_rate"] - one.complete[SELF]["hit_rate"]
    return f"{behind:.4f} behind {best}" if behind > HIT_RATE_SLACK else None


def _same(one: Comparison) -> str | None:
    ours, paged = one.outcomes[SELF], one.outcomes["paged"]
    same = ours.get("decisions") == paged.get("decisions") and "decisions" in ours
    return None if same else f"steps {ours.get('steps')} and {paged.get('steps')}"


def refusals(compared: Sequence[Comparison]) -> Iterator[tuple[str, str, str]]:
    """Refusals: comparison, manager, reason."""
    for one in compared:
        for manager, outcome in one.outcomes.items():
            if is_refused(outcome):
                yield one.name, manager, outcome["refused"]
            elif outcome["requests_refused"]:
                longest = f"{outcome['requests_refused']} requests are longer than it can hold"
                yield one.name, manager, longest

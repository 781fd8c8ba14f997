"""The clauses of the matrix: what must hold of Kvell's manager beside the others.  Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.managers.cells import DIVISIONS

SELF, PAGED = "kvell", "paged"
MOST_STEPS, FEWER_STEPS = 1.01, 0.97
ONE_PAGE_SIZE = (PAGED, "max-page")
SHORT_OF_MEMORY, WON, HIT_RATE_SLACK, STEPS_SLACK = 0.2, 0.8, 0.005, 1e-9

Outcome = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The outcomes of all policies on one case.

    :param kinds: of the shape's layers.
    """

    name: str
    kinds: Sequence[str]
    outcomes: Mapping[str, Outcome]

    @property
    def others(self) -> dict[str, Outcome]:
        """Outcomes of other policies that refused no more requests than Kvell."""
        most = self.outcomes[SELF].get("requests_refused", 0)
        return {
            name: outcome
            for name, outcome in self.outcomes.items()
            if name != SELF and not is_refused(outcome) and outcome["requests_refused"] <= most
        }


@dataclass(frozen=True)
class Verdict:
    """One clause over the comparisons that it applies to.

    :param missed: comparison to what was measured, where the clause does not hold.
    :param required: the share of comparisons in which the clause must hold.
    """

    clause: str
    compared: int
    missed: Mapping[str, str]
    required: float = 1.0

    @property
    def share(self) -> float:
        """The share of comparisons in which the clause holds."""
        return 1 - len(self.missed) / max(1, self.compared)

    @property
    def holds(self) -> bool:
        """Whether the clause holds in the required share of at least one comparison."""
        return self.compared > 0 and self.share >= self.required

    def as_json(self) -> dict[str, Any]:
        """Return the fields, the share and whether the clause holds."""
        return {**asdict(self), "share": self.share, "holds": self.holds}


def is_refused(outcome: Outcome) -> bool:
    """Return whether the manager ran nothing of the case."""
    return "refused" in outcome


def complete(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that have an outcome of every division of memory."""
    return [one for one in comparisons if all(name in one.outcomes for name in DIVISIONS)]


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Judge every clause."""
    compared = complete(comparisons)
    short = [one for one in compared if len(one.kinds) > 1 and _is_short(one.outcomes[PAGED])]
    plain = [one for one in compared if list(one.kinds) == ["full"]]
    return [
        _verdict("kvell runs every case", compared, _ran),
        _verdict(f"steps ≤ {MOST_STEPS} × the best of the others", compared, _steps),
        _verdict(
            "≥ 3 % fewer steps than paged and max-page, where layers differ and paged is short of "
            f"memory in ≥ {SHORT_OF_MEMORY:.0%} of its steps",
            short,
            _fewer,
            WON,
        ),
        _verdict(f"hit rate ≥ the best − {HIT_RATE_SLACK}", compared, _hits),
        _verdict("full attention only: the decisions of paged", plain, _same),
    ]


def _verdict(
    clause: str,
    compared: Sequence[Comparison],
    problem: Callable[[Comparison], str | None],
    required: float = 1.0,
) -> Verdict:
    problems = {one.name: problem(one) for one in compared}
    missed = {name: why for name, why in problems.items() if why is not None}
    return Verdict(clause, len(compared), missed, required)


def _is_short(outcome: Outcome) -> bool:
    return not is_refused(outcome) and bool(outcome["short_of_memory"] >= SHORT_OF_MEMORY)


def _ran(one: Comparison) -> str | None:
    refused = one.outcomes[SELF].get("refused")
    return None if refused is None else str(refused)


def _steps(one: Comparison) -> str | None:
    return _steps_over(one, one.others, MOST_STEPS)


def _fewer(one: Comparison) -> str | None:
    rivals = {name: one.others[name] for name in ONE_PAGE_SIZE if name in one.others}
    return _steps_over(one, rivals, FEWER_STEPS)


def _steps_over(one: Comparison, others: Mapping[str, Outcome], most: float) -> str | None:
    if is_refused(one.outcomes[SELF]):
        return "refused"
    if not others:
        return None
    best = min(others, key=lambda name: others[name]["steps"])
    ratio = one.outcomes[SELF]["steps"] / others[best]["steps"]
    return f"{ratio:.4f} × {best}" if ratio > most + STEPS_SLACK else None


def _hits(one: Comparison) -> str | None:
    if is_refused(one.outcomes[SELF]):
        return "refused"
    if not one.others:
        return None
    best = max(one.others, key=lambda name: one.others[name]["hit_rate"])
    behind = one.others[best]["hit_rate"] - one.outcomes[SELF]["hit_rate"]
    return f"{behind:.4f} behind {best}" if behind > HIT_RATE_SLACK else None


def _same(one: Comparison) -> str | None:
    ours, paged = one.outcomes[SELF], one.outcomes[PAGED]
    same = "decisions" in ours and ours["decisions"] == paged.get("decisions")
    return None if same else f"steps {ours.get('steps')} and {paged.get('steps')}"


def refusals(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line for each policy that refused a case or some of its requests."""
    for one in comparisons:
        for policy, outcome in one.outcomes.items():
            if is_refused(outcome):
                yield f"{one.name}, {policy}: {outcome['refused']}"
            elif outcome["requests_refused"]:
                yield f"{one.name}, {policy}: {outcome['requests_refused']} requests too long"

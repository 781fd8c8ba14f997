"""A check, and what came of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


class CheckError(Exception):
    """A package is not as it must be; the message says in what."""


@dataclass(frozen=True)
class Check:
    """One thing to try.

    :param try_it: returns a word on what it found, or raises :class:`CheckError`.
    :param is_needed: checks after it cannot run if it fails.
    """

    name: str
    try_it: Callable[[], str]
    is_needed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a check: it passed, it failed, or it was not run."""

    name: str
    verdict: str
    text: str

    @property
    def line(self) -> str:
        """The outcome as the last lines of the command show it."""
        return f"{self.verdict:<7} {self.name}: {self.text}"


def run_checks(checks: Sequence[Check]) -> Iterator[Outcome]:
    """Run checks in their order, up to the first needed one that fails."""
    blocked_by = ""
    for check in checks:
        if blocked_by:
            yield Outcome(check.name, "not run", f"needs: {blocked_by}")
            continue
        outcome = _outcome(check)
        if check.is_needed and outcome.verdict != "ok":
            blocked_by = check.name
        yield outcome


def _outcome(check: Check) -> Outcome:
    try:
        return Outcome(check.name, "ok", check.try_it())
    except CheckError as failure:
        return Outcome(check.name, "FAILED", str(failure))


def status_of(outcomes: Sequence[Outcome]) -> int:
    """0 if every check passed, else 1; also 1 where there was none."""
    return int(not outcomes or any(one.verdict != "ok" for one in outcomes))


def demand(is_so: bool, problem: str) -> None:
    """Fail unless something is so.

    :raises CheckError: with the problem.
    """
    if not is_so:
        raise CheckError(problem)


def demand_none(problems: Sequence[str]) -> None:
    """Fail if there is any problem.

    :raises CheckError: with the first ten problems, and the number of the others.
    """
    shown = list(problems[:10])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    demand(not problems, "; ".join(shown))

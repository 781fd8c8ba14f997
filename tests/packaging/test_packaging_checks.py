"""Checks run in order; what fails is told, and what needs it is not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.packages.checks import (
    Check,
    CheckError,
    Outcome,
    demand,
    demand_none,
    run_checks,
    status_of,
)
from tests.packaging.written import ROOT


def passes() -> str:
    return "fine"


def fails() -> str:
    raise CheckError("this is wrong")


def test_outcomes_are_lines_in_order() -> None:
    outcomes = list(run_checks([Check("one", passes), Check("two", fails)]))
    assert [one.line for one in outcomes] == ["ok      one: fine", "FAILED  two: this is wrong"]
    assert status_of(outcomes) == 1


def test_a_check_that_fails_does_not_stop_the_others() -> None:
    outcomes = list(run_checks([Check("one", fails), Check("two", passes)]))
    assert [one.verdict for one in outcomes] == ["FAILED", "ok"]


def test_nothing_runs_after_a_needed_check_that_fails() -> None:
    later = Check("later", lambda: pytest.fail("it ran"))
    outcomes = list(run_checks([Check("build", fails, is_needed=True), later, later]))
    assert outcomes[1:] == [Outcome("later", "not run", "needs: build")] * 2
    assert status_of(outcomes) == 1


def test_a_needed_check_that_passes_lets_others_run() -> None:
    outcomes = list(run_checks([Check("build", passes, is_needed=True), Check("two", passes)]))
    assert status_of(outcomes) == 0


def test_nothing_checked_is_no_success() -> None:
    assert status_of([]) == 1


def test_a_mistake_in_a_check_is_no_outcome() -> None:
    with pytest.raises(ZeroDivisionError):
        list(run_checks([Check("one", lambda: str(1 / 0))]))


def test_a_demand_that_is_met_says_nothing() -> None:
    demand(True, "wrong")
    demand_none([])


def test_a_demand_that_is_not_met_says_what_is_wrong() -> None:
    with pytest.raises(CheckError, match="wrong"):
        demand(False, "wrong")


def test_of_many_problems_the_first_are_shown() -> None:
    with pytest.raises(CheckError) as told:
        demand_none([str(number) for number in range(13)])
    assert str(told.value) == "0; 1; 2; 3; 4; 5; 6; 7; 8; 9; and 3 more"


CMAKE = Path(sys.prefix, "bin", "cmake")


def test_a_build_without_a_compiler_ends_with_one_clear_sentence(tmp_path: Path) -> None:
    command = [str(CMAKE), "-S", str(ROOT), "-B", str(tmp_path)]
    environ = {**os.environ, "CXX": "/nowhere/c++"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode
    assert (
        "Kvell cannot be built without a C++ compiler: install one (Debian: apt install g++), "
        "or install a wheel of Kvell." in " ".join(done.stderr.split())
    )

"""What tests cost, and who may cost more."""

from pathlib import Path

import pytest

from tests.budget import Costs, file_of, function_of, group_of, listed_shares, longest_first

LISTED = """
# what starts servers
3.5  tests/a.py::test_long   # two of them
0.5  tests/b.py::test_other
"""


def test_shares_are_read_by_function() -> None:
    shares = listed_shares(LISTED)
    assert shares == {"tests/a.py::test_long": 0.035, "tests/b.py::test_other": 0.005}


@pytest.mark.parametrize("nodeid", ["tests/a.py::test_it", "tests/a.py::test_it[x::y@z]"])
def test_parameters_are_no_part_of_a_function(nodeid: str) -> None:
    assert function_of(nodeid) == "tests/a.py::test_it"
    assert file_of(nodeid) == "tests/a.py"


def test_files_of_one_group_stay_together(tmp_path: Path) -> None:
    for name, mark in (("a", ""), ("b", '"one"'), ("c", '"one"'), ("d", '"two"')):
        line = f"pytestmark = pytest.mark.xdist_group({mark})\n" if mark else ""
        (tmp_path / name).write_text(f"import pytest\n{line}")
    groups = [group_of(tmp_path / name) for name in "abcd"]
    assert groups == [str(tmp_path / "a"), "one", "one", "two"]


def test_listed_files_run_first_and_the_others_in_their_order() -> None:
    nodeids = ["tests/c.py::x", "tests/b.py::x", "tests/a.py::x", "tests/a.py::test_long"]
    assert longest_first(nodeids, listed_shares(LISTED)) == [2, 3, 1, 0]


def test_a_test_that_is_not_listed_may_take_little() -> None:
    costs = Costs()
    for i in range(1000):
        costs.add(f"tests/c.py::test_{i}", 1.0)
    costs.add("tests/a.py::test_long[x]", 30.0)
    costs.add("tests/a.py::test_long[y]", 20.0)
    costs.add("tests/d.py::test_new", 49.0)
    [line] = costs.too_slow(listed_shares(LISTED))
    assert line.startswith("tests/d.py::test_new took 49.0 s")
    assert costs.slowest_files(2) == [("tests/c.py", 1000.0), ("tests/a.py", 50.0)]


def test_a_listed_test_may_not_take_whatever_it_likes() -> None:
    costs = Costs()
    costs.add("tests/c.py::test_rest", 10.0)
    costs.add("tests/a.py::test_long", 1.0)
    found = list(costs.too_slow({"tests/a.py::test_long": 0.02, "tests/c.py::test_rest": 1.0}))
    assert len(found) == 1
    assert "9.09%" in found[0]


def test_a_setup_counts_for_its_file() -> None:
    costs = Costs()
    costs.add("tests/c.py::test_rest", 90.0)
    costs.add("tests/a.py::test_first[x]", 9.0, is_around=True)
    costs.add("tests/a.py::test_first[x]", 1.0)
    assert costs.total_seconds == 100
    assert costs.slowest_files(2) == [("tests/c.py", 90.0), ("tests/a.py", 10.0)]
    assert not list(costs.too_slow({"tests/c.py::test_rest": 1.0}))

"""How many connections there are descriptors for."""

import resource
import subprocess
import sys

import pytest

from kvell.errors import ChangeSomething
from kvell.server import run as fitting
from kvell.server.run import FEWEST, RESERVED, connections_that_fit

SCRIPT = """
import resource, sys
from kvell.device.open_files import allow_open_files
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(wanted if wanted else None), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "after"),
    [
        (64, 200, 100, "100 100 200"),  # no more than wanted
        (64, 200, 300, "200 200 200"),  # no more than allowed
        (64, 200, 0, "200 200 200"),
        (64, 200, 32, "64 64 200"),  # never lowered
    ],
)
def test_the_limit_is_raised_as_far_as_wanted(
    soft: int, hard: int, wanted: int, after: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(wanted)]
    assert subprocess.check_output(command, text=True).strip() == after


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    limits = [0]

    def allow(wanted: int) -> int:
        limits.append(wanted)
        return min(wanted, limits[0])

    monkeypatch.setattr(fitting, "allow_open_files", allow)
    return limits


@pytest.mark.parametrize(
    ("limit", "fit"), [(1 << 20, 4096), (5462, 4096), (4096, 3072), (256, 152)]
)
def test_a_reserve_stays_for_all_else(open_files: list[int], limit: int, fit: int) -> None:
    open_files[0] = limit
    assert connections_that_fit(4096, instances=1) == fit
    assert limit - fit >= RESERVED or fit == 4096


def test_too_few_are_refused_with_the_remedy(open_files: list[int]) -> None:
    open_files[0] = RESERVED + FEWEST
    with pytest.raises(ChangeSomething, match=r"max_connections=4096: .* of 120 or more \(ulimit"):
        connections_that_fit(4096, instances=1)
    open_files[0] = 120
    assert connections_that_fit(4096, instances=1) == FEWEST
    with pytest.raises(ChangeSomething, match="ask for 16 or more"):
        connections_that_fit(FEWEST - 1, instances=1)


def test_this_process_keeps_its_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections_that_fit(FEWEST, instances=1) == FEWEST
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before

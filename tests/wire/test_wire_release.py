"""Two releases of Kvell do not talk to each other, and both say why."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.fleet.fleet import MemberCallbacks
from kvell.fleet.followed.followed_members import FollowedCluster, FollowedMembers, ManagerAddress
from kvell.fleet.instance.instance_process import dial
from kvell.fleet.started.front_limits import FrontLimits
from kvell.release import RELEASE
from kvell.wire.blocking import BlockingSocket
from kvell.wire.endpoints import connect_to
from kvell.wire.greeting import Greeting
from kvell.wire.session import open_session
from tests.wire.other_release import SECRET

SCRIPT = Path(__file__).with_name("other_release.py")
OTHER = "9.9"
FRONT = Greeting("front", 2, "", 0)


@contextlib.contextmanager
def other(release: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), release],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        address = next(line for line in process.stdout if line.startswith("tcp://"))
        yield address.strip(), process
        process.stdin.close()


def test_whoever_connects_is_told_which_releases_they_are() -> None:
    with other(OTHER) as (address, process):
        with connect_to(address, 10) as sock, pytest.raises(ChangeSomething) as caught:
            open_session(BlockingSocket(sock), FRONT, SECRET, "cluster")
        assert process.stdout is not None
        said = next(line for line in process.stdout if "closed" in line)
    assert (caught.value.field, caught.value.value) == ("release", OTHER)
    assert RELEASE in caught.value.problem
    assert f"the peer's release is {RELEASE}, not {OTHER}" in said


def test_the_same_release_is_let_in() -> None:
    with other(RELEASE) as (address, _):
        sock, heard = asyncio.run(dial(address, FRONT, SECRET, "cluster"))
        sock.close()
    assert heard.instance == "manager"


def test_a_front_of_another_release_does_not_try_for_ever() -> None:
    """Its start ends with what must be changed, long before a start is given up."""
    met: list[str] = []

    async def joins(address: str) -> None:
        async def find() -> ManagerAddress:
            met.append(address)
            return ManagerAddress(address, SECRET, "")

        def nothing(*_what: object) -> None:
            return None

        callbacks = MemberCallbacks(*[nothing] * 6)
        limits = FrontLimits(startup_seconds=600.0)
        fleet: FollowedMembers = FollowedCluster(find).members(limits, callbacks, {})
        await fleet.start({})

    with other(OTHER) as (address, _), pytest.raises(ChangeSomething, match=f"release={OTHER}"):
        asyncio.run(joins(address))
    assert met, "the manager was found"

"""Finding a manager by another process: what it is asked, what it says, and what is no answer."""

import asyncio
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.manager.settings import ClusterSettings
from kvell.fleet.placing import meeting
from kvell.fleet.placing.meeting import answer, meet
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.fleet.started.supervisor import RestartPolicy
from tests.front.scenarios import run

SETTINGS = ClusterSettings(
    "blue",
    ("instance", "--model", "m", "{host}"),
    {"prefill": 1, "decode": 2},
    replace(FrontLimits(), drain_seconds=7.5, restart=RestartPolicy(0.5, 2.0, 3)),
    PoolSettings(2, adaptive_roles=True),
    bytes(range(32)),
)
ASKED = msgspec.msgpack.encode(("10.0.0.1:6379", SETTINGS))


def program(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def saying(reply: bytes) -> tuple[str, ...]:
    """A program that checks what it is asked, says something, and more on stderr."""
    return program(
        "import sys\n"
        f"assert sys.stdin.buffer.read() == {ASKED!r}\n"
        "sys.stderr.write('noise of Ray')\n"
        f"sys.stdout.buffer.write({reply!r})\n"
    )


def test_settings_cross_whole() -> None:
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(SETTINGS), type=ClusterSettings) == SETTINGS
    )


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({"name": "green"}, True),
        ({"counts": {"mixed": 9}}, True),
        ({"secret": bytes(32)}, True),
        ({"limits": FrontLimits()}, True),
        ({"command": ("instance", "--model", "other")}, False),
        ({"pool": PoolSettings(1)}, False),
    ],
)
def test_a_fingerprint_is_of_what_fronts_must_agree_on(
    changed: dict[str, object], is_same: bool
) -> None:
    other = msgspec.structs.replace(SETTINGS, **changed)
    assert (other.fingerprint == SETTINGS.fingerprint) == is_same


def test_the_manager_is_found() -> None:
    async def met(cluster: str, settings: ClusterSettings) -> tuple[str, bytes]:
        assert (cluster, settings) == ("10.0.0.1:6379", SETTINGS)
        return "tcp://10.0.0.2:5", settings.secret

    reply = answer(ASKED, met)

    async def scenario() -> None:
        found = await meet("10.0.0.1:6379", SETTINGS, saying(reply))
        assert found == ("tcp://10.0.0.2:5", SETTINGS.secret)

    run(scenario())


def test_what_is_wrong_is_told_as_it_was() -> None:
    error: Exception = ChangeSomething("--cluster", "auto", "no Ray answers there", "start one")

    async def met(cluster: str, settings: ClusterSettings) -> tuple[str, bytes]:
        raise error

    async def scenario() -> None:
        with pytest.raises(ChangeSomething) as changed:
            await meet("10.0.0.1:6379", SETTINGS, saying(must_change))
        assert str(changed.value) == "--cluster=auto: no Ray answers there; start one"
        with pytest.raises(TryLater, match="does not answer"):
            await meet("10.0.0.1:6379", SETTINGS, saying(not_now))

    must_change = answer(ASKED, met)
    error = TryLater("the manager does not answer")
    not_now = answer(ASKED, met)
    run(scenario())


@pytest.mark.parametrize(
    "code", ["pass", "print('Traceback')", "import sys; sys.exit(3)", "import os; os.abort()"]
)
async def test_a_program_that_fails_is_tried_later(code: str) -> None:
    with pytest.raises(TryLater, match="was not found"):
        await meet("10.0.0.1:6379", SETTINGS, program(code))


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.3)
    made: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def creating(*words: str, **options: Any) -> asyncio.subprocess.Process:
        made.append(await create(*words, **options))
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", creating)

    async def scenario() -> None:
        with pytest.raises(TryLater, match="was not found"):
            await meet("10.0.0.1:6379", SETTINGS, program("import time; time.sleep(60)"))
        [child] = made
        assert await child.wait() == -9

    run(scenario())

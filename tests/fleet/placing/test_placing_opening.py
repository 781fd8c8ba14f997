"""From ``--cluster`` to the manager: what is refused before anything is started."""

import importlib.util
import subprocess
import sys

import pytest

from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.manager.settings import ClusterSettings
from kvell.fleet.placing import opening
from kvell.fleet.placing.opening import check_ray, manager_finder
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings

SETTINGS = ClusterSettings(
    "kvell", ("instance",), {"mixed": 1}, FrontLimits(), PoolSettings(), bytes(32)
)


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ChangeSomething, match=r'pip install "kvell\[ray\]"'):
        check_ray("auto")
    with pytest.raises(ChangeSomething, match="which is not installed"):
        manager_finder("auto", SETTINGS)


def test_ray_is_imported_where_it_is_asked_for_alone() -> None:
    """Not by the server, nor by what opens it."""
    code = (
        "import sys\nimport kvell.cli.main, kvell.server.run, kvell.fleet.placing.opening\n"
        "import kvell.fleet.placing.ray.node, kvell.fleet.placing.cluster_site\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_where_no_ray_answers_that_is_said_at_once() -> None:
    pytest.importorskip("ray")
    find = manager_finder("127.0.0.1:9", SETTINGS)
    with pytest.raises(ChangeSomething, match="no Ray answers there"):
        await find()


async def test_a_ray_that_is_away_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there: so the address is right, and the front goes on without it."""
    replies: list[tuple[str, bytes] | ChangeSomething] = [
        ("tcp://10.0.0.1:5", b"secret"),
        ChangeSomething("--cluster", "auto", "no Ray answers there", "start one"),
        ("tcp://10.0.0.2:6", b"secret"),
    ]

    async def meet(cluster: str, settings: ClusterSettings) -> tuple[str, bytes]:
        assert (cluster, settings) == ("auto", SETTINGS)
        reply = replies.pop(0)
        if isinstance(reply, ChangeSomething):
            raise reply
        return reply

    monkeypatch.setattr(opening, "meet", meet)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    find = manager_finder("auto", SETTINGS)
    first = await find()
    assert (first.address, first.secret) == ("tcp://10.0.0.1:5", b"secret")
    assert (first.fingerprint, first.cluster) == (SETTINGS.fingerprint, "kvell")
    with pytest.raises(TryLater, match="no Ray answers there"):
        await find()
    assert (await find()).address == "tcp://10.0.0.2:6"

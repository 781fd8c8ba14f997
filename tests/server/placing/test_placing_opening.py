"""From ``--cluster`` to a site: what is refused before anything is started."""

import asyncio
import importlib.util
import subprocess
import sys

import pytest

from kvell.errors import ChangeSomething
from kvell.server.placing.opening import check_ray, check_reachable, cluster_site


@pytest.mark.parametrize(
    ("host", "here", "machines"),
    [
        ("127.0.0.1", "10.0.0.1", ["10.0.0.1"]),
        ("localhost", "127.0.0.2", ["127.0.0.2", "127.0.0.3"]),
        ("10.0.0.1", "10.0.0.1", ["10.0.0.1", "10.0.0.2"]),
        ("::1", "10.0.0.1", []),
        ("front.example", "10.0.0.1", ["10.0.0.2"]),
    ],
)
def test_addresses_that_all_machines_reach(host: str, here: str, machines: list[str]) -> None:
    check_reachable(host, here, machines)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_loopback_address_is_not_for_other_machines(host: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        check_reachable(host, "10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    assert str(caught.value).count("10.0.0.2") == 1
    assert "--cluster-host 10.0.0.1" in str(caught.value)


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ChangeSomething, match=r'pip install "kvell\[ray\]"'):
        check_ray("auto")

    async def scenario() -> None:
        async with cluster_site("auto", "127.0.0.1", 1.0):
            raise AssertionError("it is there")

    with pytest.raises(ChangeSomething, match="which is not installed"):
        asyncio.run(scenario())


def test_ray_is_imported_where_it_is_asked_for_alone() -> None:
    """Not by the server, nor by what opens it."""
    code = (
        "import sys\nimport kvell.cli.main, kvell.server.run, kvell.server.placing.opening\n"
        "import kvell.server.placing.ray_node, kvell.server.placing.cluster_site\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_where_no_ray_answers_that_is_said_at_once() -> None:
    pytest.importorskip("ray")

    async def scenario() -> None:
        async with cluster_site("127.0.0.1:9", "127.0.0.1", 1.0):
            raise AssertionError("it is there")

    with pytest.raises(ChangeSomething, match="no Ray answers there"):
        asyncio.run(scenario())

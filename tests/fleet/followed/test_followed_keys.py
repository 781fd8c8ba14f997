"""Two fronts of a cluster and one key: its limits hold for both together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

import kvell.fleet.manager.manager as manager_module
from kvell.clock import MonotonicClock
from kvell.fleet.followed.followed_members import FollowedCluster, ManagerAddress
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.front.front import Front
from kvell.server.access.accounts import ApiKey
from kvell.server.access.keys import KeyRing, digest_of
from kvell.server.access.shared_use import SharedUse
from kvell.server.api.door.access_guard import Access
from kvell.server.api.openai_api import build_app
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.testing.instance import ByteText
from tests.fleet.followed.scripted_cluster import LIMITS
from tests.fleet.manager.front_client import SECRET, Managed, managed
from tests.fleet.placing.host_placement import HostPlacement
from tests.front.scenarios import until

WORDS = ("--door", "{host}", "--incarnation", "{incarnation}", "--instance-id", "{instance_id}")
KEYS = (
    ApiKey("red", digest_of(b"red"), 20, 2000),
    ApiKey("blue", digest_of(b"blue"), max_in_flight=4),
)


class StoppedClock(MonotonicClock):
    """Nothing comes back while a test runs."""

    def now_seconds(self) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "ROSTER_SECONDS", 0.05)


@dataclass
class KeyedFront:
    """A front with keys, and its HTTP face."""

    ring: KeyRing
    client: httpx.AsyncClient

    async def post(self, key: str, **fields: object) -> httpx.Response:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    def left(self) -> list[int]:
        """Requests and tokens that the first key has left here."""
        told = next(iter(self.ring)).headers(1.0)
        return [int(told[f"x-ratelimit-remaining-{one}"]) for one in ("requests", "tokens")]


@asynccontextmanager
async def keyed_front(one: Managed) -> AsyncIterator[KeyedFront]:
    async def find() -> ManagerAddress:
        return ManagerAddress(one.manager.address, SECRET, "")

    clock = StoppedClock()
    ring, metrics = KeyRing(KEYS, 1.0), ServerMetrics("fake")
    uses = SharedUse(ring, clock)
    joins = FollowedCluster(
        find, beat_seconds=0.02, take_key_uses=uses.take, on_key_uses=uses.on_uses
    )
    async with Front(joins=joins, limits=LIMITS, observer=metrics) as front:
        app = build_app(front, ByteText(), metrics, access=Access(ring, clock=clock))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            yield KeyedFront(ring, client)


@asynccontextmanager
async def two_fronts() -> AsyncIterator[tuple[Managed, KeyedFront, KeyedFront]]:
    site = ClusterSite(HostPlacement(SECRET), SECRET, "kvell-test", 20.0)
    words = (*WORDS, "--step-seconds", "0.002")
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(managed(words, {"mixed": 1}, site=site))
        fronts = [await stack.enter_async_context(keyed_front(one)) for _ in range(2)]
        yield one, fronts[0], fronts[1]


async def test_limits_of_a_key_hold_over_two_fronts() -> None:
    async with two_fronts() as (one, first, other):
        await until(lambda: len(one.manager.roster().used) == 2)
        assert (await first.post("red", n=8)).status_code == 200
        assert first.left()[0] == 12
        await until(lambda: other.left() == first.left())
        assert (await other.post("red", n=7)).status_code == 200
        await until(lambda: first.left()[0] == 5 and other.left() == first.left())
        late = await first.post("red", n=6)
        assert (late.status_code, late.json()["error"]["type"]) == (429, "requests")
        assert first.left()[0] == 4, "the door counts what is refused later too"
        await until(lambda: other.left() == first.left())
        assert (await other.post("red", n=4)).status_code == 200
        await until(lambda: first.left()[0] == 0)
        assert (await first.post("red")).status_code == 429


async def test_a_key_has_so_many_in_flight_at_both_fronts_together() -> None:
    async with two_fronts() as (_, first, other):
        [_, blue] = other.ring
        running = asyncio.create_task(first.post("blue", n=3, max_tokens=4000))
        await until(lambda: blue.others_in_flight == 3)
        late = await other.post("blue", n=2)
        assert late.status_code == 429
        assert "3 sequences in flight and may have 4" in late.json()["error"]["message"]
        assert (await other.post("blue", n=1)).status_code == 200
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: blue.others_in_flight == 0)
        assert (await other.post("blue", n=4)).status_code == 200


async def test_a_front_that_comes_later_has_no_more_left_than_the_others() -> None:
    async with two_fronts() as (one, first, other):
        assert (await first.post("red", n=15)).status_code == 200
        await until(lambda: other.left()[0] == 5)
        async with keyed_front(one) as late:
            await until(lambda: late.left() == first.left())
            assert (await late.post("red", n=6)).status_code == 429
            assert (await late.post("red", n=4)).status_code == 200
            await until(lambda: first.left()[0] == other.left()[0] == late.left()[0])

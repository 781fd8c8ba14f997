"""What tests of this folder share: an engine that runs, and one in this process to compare with."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvell import LLM, AsyncEngine
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.vocabulary import MIB
from tests.front.scenarios import until

INSTANCES = "mixed=2"
SECONDS = 240.0
GREEDY_ROWS = Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl"

Scenario = Callable[[AsyncEngine], Coroutine[Any, Any, None]]


class SharedEngine:
    """Two instances that run in an event loop of their own, for one test after another."""

    def __init__(self, cache_dir: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._engine = AsyncEngine(
            "smollm2",
            instances=INSTANCES,
            routing="longest-prefix",
            limits=FrontLimits(
                drain_seconds=SECONDS, restart=RestartPolicy(0.05, 0.5, attempts=1000)
            ),
            cache_dir=cache_dir,
            dtype="float32",
            kv_memory_bytes=128 * MIB,
        )
        self._run(self._engine.start())

    def run(self, scenario: Scenario) -> None:
        """Run a test's scenario; whatever the test before has drained or killed is there again."""
        self._run(self._whole())
        self._run(scenario(self._engine))

    async def _end(self) -> None:
        await self._engine.shutdown()

    def close(self) -> None:
        try:
            self._run(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _whole(self) -> None:
        self._engine.scale(INSTANCES)
        await until(lambda: [one.state for one in self._engine.instances()] == ["serving"] * 2)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(SECONDS):
                await work

        asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()


@pytest.fixture(scope="session")
def shared_engine(smollm2_path: Path) -> Iterator[SharedEngine]:
    """Two instances of SmolLM2; files that use it are of the group ``async_engine``."""
    engine = SharedEngine(smollm2_path.parent)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def alone(smollm2_path: Path) -> LLM:
    return LLM("smollm2", cache_dir=smollm2_path.parent, dtype="float32", kv_memory_bytes=256 * MIB)


@cache
def greedy_rows() -> list[dict[str, Any]]:
    return [json.loads(row) for row in GREEDY_ROWS.read_text().splitlines()]

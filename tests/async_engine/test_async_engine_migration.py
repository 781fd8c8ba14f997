"""Requests that leave a real instance in the middle of their answers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvell import LLM, AsyncEngine, SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.errors import ChangeSomething
from kvell.fleet.started.front_limits import FrontLimits
from kvell.vocabulary import MIB
from tests.async_engine.conftest import SECONDS, SharedEngine
from tests.front.scenarios import run
from tests.front.seen import front_of, queue_of

pytestmark = pytest.mark.xdist_group("async_engine")
LONG = SamplingParams(
    temperature=1.0, seed=3, max_tokens=200, ignore_eos=True, frequency_penalty=0.1
)
FORM = SamplingParams(
    temperature=1.0,
    seed=4,
    max_tokens=200,
    structured_outputs=StructuredOutputs(regex="([a-z]{3,8} ){20}end"),
)
Asked = dict[str, tuple[str, SamplingParams]]
SHORTER = replace(LONG, max_tokens=120)
ASKED: Asked = {f"r{number}": (f"Tell me of {number}.", SHORTER) for number in range(4)}
ASKED["form"] = ("Name some words.", FORM)


def engine_of(cache_dir: Path, instances: str, kv_mib: int = 128) -> AsyncEngine:
    return AsyncEngine(
        "smollm2",
        instances=instances,
        limits=FrontLimits(drain_seconds=SECONDS),
        cache_dir=cache_dir,
        dtype="float32",
        kv_memory_bytes=kv_mib * MIB,
        max_model_len=512,
    )


class Streams:
    """Requests that are read, and what they have so far."""

    def __init__(self, engine: AsyncEngine, asked: Asked = ASKED) -> None:
        self._engine, self._asked = engine, asked
        self.tokens: dict[str, list[int]] = {}
        self.tasks = {name: asyncio.create_task(self._read(name)) for name in asked}

    async def _read(self, name: str) -> None:
        prompt, params = self._asked[name]
        async for output in self._engine.generate(prompt, params, request_id=name):
            self.tokens[name] = output.token_ids

    def ended(self) -> int:
        return sum(task.done() for task in self.tasks.values())

    async def end(self) -> dict[str, list[int]]:
        await asyncio.gather(*self.tasks.values())
        return self.tokens


def attempts(engine: AsyncEngine) -> dict[str, int]:
    submitted, waiting, *_ = front_of(engine).entries()
    return {entry.request_id: entry.attempt for entry in (*submitted, *waiting)}


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.01)


def alone_of(alone: LLM) -> dict[str, list[int]]:
    prompts, params = zip(*ASKED.values(), strict=True)
    outputs = alone.generate(prompts, params)
    return {name: one.token_ids for name, one in zip(ASKED, outputs, strict=True)}


async def drains(engine: AsyncEngine, expected: dict[str, list[int]]) -> None:
    """Drain an instance while it answers: another one goes on with all that it has left."""
    streams = Streams(engine)
    lines = queue_of(front_of(engine)).lines
    await until(lambda: all(len(streams.tokens.get(n, ())) > 5 for n in ASKED))
    leaves = max(lines, key=lambda instance_id: len(lines[instance_id].movable()))
    assert len(lines[leaves].movable()) >= 2
    engine.drain(leaves)
    await until(lambda: leaves not in lines or not lines[leaves].in_flight)
    assert streams.ended() == 0, "handed over in the middle of their answers"
    assert attempts(engine) == dict.fromkeys(ASKED, 0), "nothing is computed again"
    await until(lambda: leaves not in {one.instance_id for one in engine.instances()})
    assert await streams.end() == expected
    for stats in (await engine.stats(with_audit=True)).values():
        assert stats.problems == ()


def test_an_instance_that_drains_hands_on_what_runs(
    shared_engine: SharedEngine, alone: LLM
) -> None:
    expected = alone_of(alone)

    async def scenario(engine: AsyncEngine) -> None:
        await drains(engine, expected)
        (stays,) = (one.instance_id for one in engine.instances())
        with pytest.raises(ChangeSomething, match="is the last one that serves"):
            engine.drain(stays)

    shared_engine.run(scenario)


@pytest.mark.long
def test_an_instance_for_decodes_that_drains_hands_on_what_runs(
    smollm2_path: Path, alone: LLM
) -> None:
    expected = alone_of(alone)

    async def scenario() -> None:
        async with engine_of(smollm2_path.parent, "prefill=1,decode=2") as engine:
            await drains(engine, expected)

    run(scenario(), SECONDS)


@pytest.mark.long
def test_memory_that_runs_short_is_relieved_by_another_instance(smollm2_path: Path) -> None:
    """Requests wait for memory until an instance joins, to which one of them goes."""
    asked = {f"r{number}": (f"Tell me of {number}.", LONG) for number in range(10)}

    async def scenario() -> None:
        async with engine_of(smollm2_path.parent, "mixed=1") as engine:
            alone = await Streams(engine, asked).end()
        async with engine_of(smollm2_path.parent, "mixed=1", 48) as engine:
            first_lines, over = dict[str, str](), asyncio.Event()

            async def repeat(number: int) -> None:
                while not over.is_set():
                    prompt, params = asked[f"r{number}"]
                    outputs = [one async for one in engine.generate(prompt, params)]
                    assert outputs[-1].token_ids == alone[f"r{number}"]

            def has_moved() -> bool:
                assert not any(task.done() for task in streams)
                for one in front_of(engine).entries()[0]:
                    first = first_lines.setdefault(one.request_id, one.line)
                    if one.line != first and not one.attempt:
                        return True
                return False

            streams = [asyncio.create_task(repeat(number)) for number in range(len(asked))]
            line = queue_of(front_of(engine)).lines["mixed-0"]
            await until(lambda: line.waiting > 1)
            engine.scale("mixed=2")
            await until(has_moved)
            over.set()
            await asyncio.gather(*streams)
            for stats in (await engine.stats(with_audit=True)).values():
                assert stats.problems == ()

    run(scenario(), SECONDS)

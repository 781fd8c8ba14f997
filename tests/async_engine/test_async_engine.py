"""``kvell.AsyncEngine`` over real instances: the same answers as one engine in this process."""

import asyncio
from pathlib import Path

import pytest

from kvell import AsyncEngine, SamplingParams
from kvell.async_engine import StreamedOutput
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.vocabulary import MIB
from tests.async_engine.conftest import SECONDS, SharedEngine, greedy_rows
from tests.front.scenarios import run

pytestmark = pytest.mark.xdist_group("async_engine")


def engine_of(cache_dir: Path, instances: str) -> AsyncEngine:
    return AsyncEngine(
        "smollm2",
        instances=instances,
        cache_dir=cache_dir,
        dtype="float32",
        kv_memory_bytes=128 * MIB,
    )


async def last_of(engine: AsyncEngine, prompt: object, params: SamplingParams) -> StreamedOutput:
    outputs = [output async for output in engine.generate(prompt, params)]  # type: ignore[arg-type]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def weights_of(pid: int) -> dict[str, int]:
    """KiB of the shared weights' memory file in a process, by kind."""
    sizes: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name:
            inside = "kvell-weights" in line
        elif inside and rest.endswith("kB"):
            sizes[name] = sizes.get(name, 0) + int(rest.split()[0])
    return sizes


@pytest.mark.parametrize(
    ("count", "length"), [(6, 24), pytest.param(50, 64, marks=pytest.mark.long)]
)
def test_two_instances_answer_as_one_and_have_the_weights_once(
    shared_engine: SharedEngine, alone: LLM, count: int, length: int
) -> None:
    """Committed prompts, greedy and with seeds."""
    oracle = greedy_rows()[:count]
    drawn = [SamplingParams(temperature=1.0, seed=n, max_tokens=length // 2) for n in range(count)]
    prompts = [row["prompt_token_ids"] for row in oracle]
    expected = [one.token_ids for one in alone.generate(prompts, drawn)]
    assert len({tuple(tokens) for tokens in expected}) == count

    async def scenario(engine: AsyncEngine) -> None:
        before = await engine.stats()
        greedy = SamplingParams(temperature=0, max_tokens=length)
        answers = await asyncio.gather(*(last_of(engine, p, greedy) for p in prompts))
        assert [one.token_ids for one in answers] == [row["token_ids"][:length] for row in oracle]
        pairs = zip(prompts, drawn, strict=True)
        seeded = await asyncio.gather(*(last_of(engine, p, params) for p, params in pairs))
        assert [one.token_ids for one in seeded] == expected
        stats = await engine.stats(with_audit=True)
        assert set(stats) == set(before) and len(stats) == 2
        for name, one in stats.items():
            assert one.prompt_tokens > before[name].prompt_tokens, "both had some"
            assert one.problems == ()
        for status in engine.instances():
            assert status.pid is not None
            sizes = weights_of(status.pid)
            assert sizes["Rss"] > 400_000, "the model's weights are 513 MiB"
            assert sizes["Pss"] <= 0.51 * sizes["Rss"]
            assert sizes["Private_Dirty"] + sizes["Private_Clean"] == 0

    shared_engine.run(scenario)


@pytest.mark.long
def test_scaling_under_load_loses_nothing(smollm2_path: Path) -> None:
    async def scenario() -> None:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        async with engine_of(smollm2_path.parent, "mixed=1") as engine:
            alone = [await last_of(engine, f"Tell me of {n}.", params) for n in range(4)]
            over, answers = asyncio.Event(), list[tuple[int, list[int]]]()

            async def stream(number: int) -> None:
                while not over.is_set():
                    output = await last_of(engine, f"Tell me of {number}.", params)
                    answers.append((number, output.token_ids))

            def states() -> dict[str, str]:
                return {one.instance_id: one.state for one in engine.instances()}

            async def until_states(*names: str) -> None:
                while states() != dict.fromkeys(names, "serving"):
                    await asyncio.sleep(0.02)

            streams = [asyncio.create_task(stream(number % 4)) for number in range(8)]
            engine.scale("mixed=3")
            await until_states("mixed-0", "mixed-1", "mixed-2")
            stats = await engine.stats()
            while not all(one.prompt_tokens for one in stats.values()):  # each gets traffic
                await asyncio.sleep(0.05)
                stats = await engine.stats()
            engine.drain("mixed-0")
            await until_states("mixed-1", "mixed-2")
            engine.scale({"mixed": 1})
            await until_states("mixed-1")
            over.set()
            await asyncio.gather(*streams)
            assert len(answers) >= 8
            assert all(tokens == alone[number].token_ids for number, tokens in answers)

    run(scenario(), SECONDS)


def test_an_engine_that_is_not_started_says_so(smollm2_path: Path) -> None:
    async def scenario() -> None:
        engine = engine_of(smollm2_path.parent, "1")
        greedy = SamplingParams(temperature=0, max_tokens=8)
        with pytest.raises(ChangeSomething, match="is not started"):
            await last_of(engine, {"prompt": "a", "model": "smollm2"}, greedy)

    run(scenario(), SECONDS)


def test_texts_chats_and_mistakes(shared_engine: SharedEngine) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        assert "Paris" in (await last_of(engine, "The capital of France is", greedy)).text
        asked = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
        told = await last_of(engine, "The capital of France is", asked)
        assert told.logprobs is not None and told.prompt_logprobs is not None
        assert [len(one.top) for one in told.logprobs] == [2] * len(told.token_ids)
        assert [one.rank for one in told.logprobs] == [1] * len(told.token_ids)
        assert len(told.prompt_logprobs) == len(told.prompt_token_ids) - 1
        messages = [{"role": "user", "content": "Name the capital of France."}]
        texts = [output.text async for output in engine.chat(messages, greedy)]
        assert "Paris" in texts[-1]
        assert all(texts[-1].startswith(text) for text in texts)
        with pytest.raises(ChangeSomething, match="model=other: is not served"):
            await last_of(engine, {"prompt": "a", "model": "other"}, greedy)
        with pytest.raises(ChangeSomething, match="text='a': is not a field of a prompt"):
            await last_of(engine, {"text": "a"}, greedy)
        forever = SamplingParams(max_tokens=1 << 12, ignore_eos=True)
        reasons = []
        async for output in engine.generate("Count", forever, request_id="mine"):
            engine.abort("mine")
            reasons.append(output.finish_reason)
        assert reasons[-1] == "stop"

    shared_engine.run(scenario)


@pytest.mark.parametrize("instances", ["prefill=1", "mixed=0", "many", {}])
def test_instances_that_cannot_be_are_refused(smollm2_path: Path, instances: str) -> None:
    with pytest.raises(ChangeSomething, match="instances="):
        AsyncEngine("smollm2", instances=instances, cache_dir=smollm2_path.parent)


def test_vectors_are_those_of_one_engine(shared_engine: SharedEngine, alone: LLM) -> None:
    """From two instances, beside an answer; one that is cancelled holds nothing."""
    prompts = [row["prompt_token_ids"] for row in greedy_rows()[:4]]
    expected = [one.embedding for one in alone.embed([*prompts, "What is a page?"])]

    async def scenario(engine: AsyncEngine) -> None:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        answer = asyncio.create_task(last_of(engine, prompts[0], greedy))
        asked = (*prompts, {"prompt": "What is a page?", "model": "smollm2"})
        outputs = await asyncio.gather(*(engine.embed(one) for one in asked))
        for output, vector in zip(outputs, expected, strict=True):
            assert output.embedding == pytest.approx(vector, abs=1e-6)
        assert [output.prompt_token_ids for output in outputs[:-1]] == prompts
        assert len((await answer).token_ids) == 16
        again = await engine.embed(prompts[0], "mine", cache_salt="other")
        assert again.cached_tokens == 0
        leaving = asyncio.create_task(engine.embed([5] * 4000, cache_salt="left"))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(ChangeSomething, match="another: is not served"):
            await engine.embed({"prompt": "text", "model": "another"})
        await engine.embed("after")
        for stats in (await engine.stats(with_audit=True)).values():
            assert stats.problems == ()

    shared_engine.run(scenario)

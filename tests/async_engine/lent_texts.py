"""Texts that instances answer while they lend memory."""

from pathlib import Path

from kvell import LLM
from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import MIB
from tests.async_engine.conftest import greedy_rows

KV_BYTES = 96 * MIB


"""2,184 tokens of SmolLM2 in float32."""

Said = tuple[list[int], list[TokenLogprobs]]


def texts() -> list[list[int]]:
    return [row["prompt_token_ids"] for row in greedy_rows()]


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def alone(
    smollm2_path: Path, prompts: list[tuple[list[int], int]], kv_bytes: int = 2 * KV_BYTES
) -> list[Said]:
    """What one engine with more memory says."""
    llm = LLM(str(smollm2_path), dtype="float32", kv_memory_bytes=kv_bytes)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in prompts],
        [sampling(count) for _, count in prompts],
        sequential=True,
    )
    return [(one.token_ids, one.logprobs or []) for one in outputs]


async def said(engine: AsyncEngine, prompt: list[int], count: int, model: str = "") -> Said:
    found: Said = ([], [])
    asked = {"prompt_token_ids": prompt, "model": model}
    async for output in engine.generate(asked, sampling(count)):
        found = (list(output.token_ids), list(output.logprobs or []))
    return found


async def sections(engine: AsyncEngine, name: str) -> int:
    """Return so many sections of all instances: ``lent``, ``borrowed``, ``returned``, ``lost``."""
    return sum(stats.sections[name] for stats in (await engine.stats()).values())


def text_of(tokens: int, start: int = 0) -> list[int]:
    joined = [token for text in texts() for token in text]
    joined = joined[start % len(joined) :] + joined[: start % len(joined)]
    return (joined * (1 + tokens // len(joined)))[:tokens]

"""The well-behaved tenant: a few streams at a time, each followed by the next."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from statistics import mean

import httpx

KEY = "tenant"
STREAMS = 2
OUTPUT_TOKENS = 64
ANSWER_SECONDS = 300.0
LOOK_SECONDS = 0.2
"""Between two looks at ``/livez``."""


@dataclass
class Seen:
    """What the tenant saw.

    :ivar first_seconds: from a request to its first token, one each.
    :ivar token_seconds: mean time of a token behind the first, one for each answer.
    :ivar wait_seconds: times without a token, before the first one too.
    :ivar live_seconds: how long ``/livez`` took, one for each look.
    :ivar problems: answers that were refused, failed or cut off.
    """

    first_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    live_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def longest_wait_seconds(self) -> float:
        """The longest time without a token, before the first one too."""
        return max(self.wait_seconds, default=0.0)

    @property
    def slowest_live_seconds(self) -> float:
        """The longest time of an answer to ``/livez``."""
        return max(self.live_seconds, default=0.0)

    def figures(self) -> dict[str, float]:
        """Means, and the worst waits."""
        return {
            "answers": len(self.token_seconds),
            "ttft_seconds": mean(self.first_seconds or [0.0]),
            "ttft_seconds_max": max(self.first_seconds, default=0.0),
            "tpot_milliseconds": 1000 * mean(self.token_seconds or [0.0]),
            "wait_seconds_max": self.longest_wait_seconds,
            "live_milliseconds_max": 1000 * self.slowest_live_seconds,
        }


async def behave(url: str, seconds: float) -> Seen:
    """Ask for answers for so long; an answer that is under way then is still read."""
    seen, until = Seen(), time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, headers=headers) as http:
        await asyncio.gather(
            *(_stream(http, url, number, until, seen) for number in range(STREAMS)),
            _live(http, url, until, seen),
        )
    return seen


async def _stream(http: httpx.AsyncClient, url: str, number: int, until: float, seen: Seen) -> None:
    turn = 0
    while time.monotonic() < until:
        turn += 1
        body = {
            "prompt": f"Stream {number}, question {turn}: " + "why is the sky blue? " * 8,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        asked, times = time.monotonic(), list[float]()
        try:
            latest = asked
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    seen.problems.append(f"status {answer.status_code}")
                    await asyncio.sleep(1)
                    continue
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        if "error" in json.loads(line[6:]):
                            seen.problems.append(line[:200])
                        times.append(time.monotonic())
                        seen.wait_seconds.append(times[-1] - latest)
                        latest = times[-1]
        except httpx.HTTPError as error:
            seen.problems.append(f"{type(error).__name__}: {error}")
            seen.wait_seconds.append(time.monotonic() - latest)
            continue
        if len(times) < 2:
            seen.problems.append(f"{len(times)} pieces came")
            continue
        seen.first_seconds.append(times[0] - asked)
        seen.token_seconds.append((times[-1] - times[0]) / (OUTPUT_TOKENS - 1))


async def _live(http: httpx.AsyncClient, url: str, until: float, seen: Seen) -> None:
    while time.monotonic() < until:
        asked = time.monotonic()
        try:
            answer = await http.get(f"{url}/livez")
            if answer.status_code != httpx.codes.OK:
                seen.problems.append(f"livez {answer.status_code}")
        except httpx.HTTPError as error:
            seen.problems.append(f"livez {type(error).__name__}: {error}")
        seen.live_seconds.append(time.monotonic() - asked)
        await asyncio.sleep(LOOK_SECONDS)

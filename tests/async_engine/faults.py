"""Faults of real instances at random moments under load, each proven to have happened."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvell.async_engine import AsyncEngine, StreamedOutput
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import RequestFailed, TryLater
from kvell.fleet.fleet import MemberStatus
from tests.async_engine.jobs import Job
from tests.front.scenarios import damage_next_bytes, is_gone, line_of, until
from tests.front.seen import front_of

KINDS = ("kill", "stop", "damage")
RETRIED = "a request is retried twice"
SUSPECTED = "two instances ended while they computed it"
REFUSALS = (RETRIED, SUSPECTED)
"""Why an accepted request may get no answer: three deaths, or two that it may have caused."""
MOST_PAUSE_SECONDS = 1.0


@dataclass
class Outcome:
    """What a run under faults came to.

    :ivar faults: by kind, those that were proven.
    :ivar wrong: answers that differ from the undisturbed ones.
    """

    faults: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    turned_away: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[tuple[Job, list[int]]] = field(default_factory=list)

    def has_load(self, faults: int) -> bool:
        """Return whether more requests than faults were answered, so that another may follow."""
        return self.answered > faults

    def unexpected(self, refusals: Sequence[str] = REFUSALS) -> list[str]:
        return [why for why in self.refused if not any(part in why for part in refusals)]


async def whole(engine: AsyncEngine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The tokens of an answer; each output must go on where the one before stopped."""
    last: StreamedOutput | None = None
    async for output in engine.generate(list(prompt), params):
        if last is not None:
            assert output.token_ids[: len(last.token_ids)] == last.token_ids
        last = output
    assert last is not None
    return last.token_ids


def serving(engine: AsyncEngine) -> list[MemberStatus]:
    return [one for one in engine.instances() if one.state == "serving"]


def busy(engine: AsyncEngine) -> list[MemberStatus]:
    lines = {status.instance_id: line for status, line in front_of(engine).instances()}
    return [one for one in serving(engine) if lines[one.instance_id].in_flight]


async def break_one(engine: AsyncEngine, kind: str, chance: random.Random) -> None:
    """Let a random busy instance fail, and wait until it is gone: the proof that it happened.

    Another one serves at that moment, so that there is a survivor.
    """
    await until(lambda: bool(busy(engine)) and len(serving(engine)) > 1)
    victim = chance.choice(busy(engine))
    assert victim.pid is not None
    if kind == "damage":
        await damage_next_bytes(line_of(front_of(engine), victim.instance_id), chance).wait()
    else:
        os.kill(victim.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    pid, name = victim.pid, victim.instance_id
    await until(lambda: is_gone(pid))
    await until(lambda: _restarts(engine, name) > victim.restarts)


async def disturbed(
    engine: AsyncEngine, jobs: Sequence[Job], moments: int, streams: int, seed: int
) -> Outcome:
    """Keep so many streams busy while instances fail at so many random moments."""
    outcome, chance, over = Outcome(), random.Random(seed), asyncio.Event()

    async def stream(number: int) -> None:
        own = random.Random(f"{seed}-{number}")
        while not over.is_set():
            job = own.choice(jobs)
            try:
                tokens = await whole(engine, job.prompt, job.sampling)
            except RequestFailed as error:
                outcome.refused.append(str(error))
                continue
            except TryLater:  # not accepted: all instances are down at once
                outcome.turned_away += 1
                await until(lambda: bool(serving(engine)))
                continue
            outcome.answered += 1
            if tokens != job.tokens:
                outcome.wrong.append((job, tokens))

    async with asyncio.TaskGroup() as running:
        for number in range(streams):
            running.create_task(stream(number))
        for moment in range(moments):
            await until(partial(outcome.has_load, moment))
            await asyncio.sleep(chance.uniform(0, MOST_PAUSE_SECONDS))  # a random moment
            kind = KINDS[moment % len(KINDS)]
            await break_one(engine, kind, chance)
            outcome.faults[kind] += 1
        over.set()
    await until(lambda: len(serving(engine)) == len(engine.instances()))
    return outcome


def _restarts(engine: AsyncEngine, instance_id: str) -> int:
    [one] = [one for one in engine.instances() if one.instance_id == instance_id]
    return one.restarts

"""Engines that hand requests over to each other: one of the bench's own, and one's process."""

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvell.cli.terminal.environment import process_cache_dir
from kvell.engine.assembly import EngineOptions, build_engine, load_model
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Event, Finished, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.mempool.rendezvous import FolderRendezvous, PageTransport, TransferMethod
from kvell.models.sources.source import resolve_model
from kvell.vocabulary import MIB, RequestId

MODEL = "smollm2"
KV_BYTES = 512 * MIB
LONGEST_TOKENS = 4096
PATIENCE_SECONDS = 120.0
TWO_TOKENS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def engine_at(name: str, folder: Path, transport: str, method: str) -> Engine:
    """An engine that listens in a folder, and computes prompts of any length in one step.

    :param transport: a :data:`.PageTransport`, and ``method`` a :data:`.TransferMethod`.
    """
    path = resolve_model(MODEL, process_cache_dir())
    model = load_model(path, "bfloat16", "cpu", lambda *_: None)
    place = FolderRendezvous(
        name,
        folder,
        pd_caching=1,
        transport=cast("PageTransport", transport),
        method=cast("TransferMethod", method),
    )
    options = EngineOptions(
        kv_memory_bytes=KV_BYTES,
        max_model_len=LONGEST_TOKENS,
        max_num_batched_tokens=LONGEST_TOKENS,
        pool_place=place,
    )
    engine = build_engine(model, MODEL, options)
    warmer = engine.warm()  # as servers do: first touches are not what is timed
    while warmer is not None and not warmer.is_done:
        warmer.wait(PATIENCE_SECONDS)
    return engine


@contextmanager
def receiving(folder: Path, transport: str) -> Iterator[None]:
    """A process of :mod:`bench.mempool.goes_on`."""
    command = [sys.executable, "-m", "bench.mempool.goes_on", str(folder), transport]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None and receiver.stdin is not None
        try:
            assert receiver.stdout.readline().strip() == "ready"
            yield
        finally:
            receiver.stdin.close()
            receiver.wait(PATIENCE_SECONDS)


@dataclass(frozen=True)
class Handed:
    """How long the pass of a prompt took, and from its end until the receiver had it all."""

    pass_seconds: float
    gap_seconds: float

    @property
    def total_seconds(self) -> float:
        """From the pass's begin until the receiver had it all."""
        return self.pass_seconds + self.gap_seconds


class Sender:
    """An engine whose passes are timed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._began = self._ended = 0.0
        run = engine.runner.run

        def timed(plan: StepPlan) -> StepResult:
            self._began = time.perf_counter()
            result = run(plan)
            self._ended = time.perf_counter()
            return result

        engine.runner.run = timed  # type: ignore[method-assign]

    def hand_over(self, name: str, prompt: "np.ndarray[Any, np.dtype[np.int32]]") -> Handed:
        """Compute a prompt, and hand its request over to the receiver."""
        ids = prompt.astype("<i4").tobytes()
        events = self.engine.handle(Submit(RequestId(name), ids, TWO_TOKENS, goes_to="receiver"))
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while not (ends := [one for one in events if isinstance(one, Finished)]):
            assert time.perf_counter() < deadline, "it never moved"
            events = self._turn()
        now = time.perf_counter()
        assert ends[0].reason == "moved", ends
        return Handed(self._ended - self._began, now - self._ended)

    def _turn(self) -> list[Event]:
        if self.engine.has_work():
            return self.engine.woken() + self.engine.step()
        wakes = self.engine.wakes()
        assert wakes is not None
        select.select([wakes], [], [], 1.0)
        return self.engine.woken()

"""A whole small trace: admission, chunked prefill, decode, preemption, release."""

from dataclasses import dataclass, field

import numpy as np

from bench.core.workloads import Ints, ints
from kvell.engine.planning.scheduler import COMPACT_LARGE_PAGES
from kvell.memory import GroupKind, PoolSnapshot
from kvell.simulator.replay.metered import MeteredCore

STEP_TOKENS = 2048
MAX_RUNNING = 256
HEADROOM = 64
"""Tokens that a newcomer leaves to each running request."""


@dataclass(eq=False)
class Request:
    """Tokens to compute and tokens to generate."""

    prompt: Ints
    output: int
    handle: int = 0
    computed: int = 0
    generated: int = 0

    @property
    def known(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + self.generated


def requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 100 to 6,000 tokens, most of them behind one of 20 long beginnings."""
    draw = np.random.default_rng(seed)
    heads = [draw.integers(0, 1000, int(n), np.int32) for n in draw.integers(200, 3000, 20)]
    made = []
    for _ in range(count):
        tail = draw.integers(0, 1000, int(draw.integers(100, 3000)), np.int32)
        head = heads[int(draw.integers(0, 20))] if draw.random() < 0.7 else tail[:0]
        made.append(Request(np.concatenate([head, tail]), int(draw.integers(20, 300))))
    return made


@dataclass
class Replay:
    """A scheduler in miniature: decodes first, then prefill, then admission, first come first."""

    core: MeteredCore
    waiting: list[Request]
    running: list[Request] = field(default_factory=list)
    steps: int = 0
    request_steps: int = 0
    preemptions: int = 0

    def run(self) -> PoolSnapshot:
        """Until every request is done; the state at the end."""
        while self.waiting or self.running:
            self.steps += 1
            self.core.begin_step(self.steps)
            before = self.preemptions
            work = self._decode()
            work += self._prefill(admit=self.preemptions == before)
            self.request_steps += len(self.running)
            self._finish(work)
            if work:
                until = ints([length for _, length in work])
                self.core.advance(ints([r.handle for r, _ in work]), until)
            for request, length in work:
                request.computed = length
            self._release()
        return self.core.snapshot()

    def _finish(self, work: list[tuple[Request, int]]) -> None:
        """End the plan: checkpoints of prompts' states, pages to move, copies to make."""
        if any(g.kind is GroupKind.STATE for g in self.core.layout.groups):
            chunks = [(r, length) for r, length in work if not r.generated]
            until = ints([length for _, length in chunks])
            self.core.checkpoint(ints([r.handle for r, _ in chunks]), until)
        self.core.compact(COMPACT_LARGE_PAGES)
        self.core.copies()

    def _decode(self) -> list[tuple[Request, int]]:
        ready = [r for r in self.running if r.computed >= len(r.prompt)]
        if not ready:
            return []
        handles = ints([r.handle for r in ready])
        self.core.append(handles, np.full(len(ready), self.steps % 1000, np.int32))
        for request in ready:
            request.generated += 1
        served, _ = self.core.grow(handles, ints([r.known for r in ready]))
        for request in ready[served:]:
            self._preempt(request)
        return [(r, r.known) for r in ready[:served]]

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.core.close(request.handle)
        self.running.remove(request)
        self.waiting.insert(0, request)
        request.generated = request.computed = 0

    def _prefill(self, *, admit: bool) -> list[tuple[Request, int]]:
        budget, work = STEP_TOKENS, []
        for request in self.running:
            if budget and request.computed < len(request.prompt):
                wanted = min(len(request.prompt), request.computed + budget)
                until = self.core.largest(request.handle, wanted)
                if until > request.computed:
                    self.core.grow(ints([request.handle]), ints([until]))
                    work.append((request, until))
                    budget -= until - request.computed
        while admit and budget > 0 and self._admit():
            budget -= len(self.running[-1].prompt) - self.running[-1].computed
        return work

    def _admit(self) -> bool:
        if not self.waiting or len(self.running) >= MAX_RUNNING:
            return False
        request = self.waiting[0]
        request.handle = self.core.open(request.prompt, "")
        others = ints([r.handle for r in self.running])
        lengths = ints([max(r.known, len(r.prompt)) + HEADROOM for r in self.running])
        size = len(request.prompt)
        if not self.core.fits(request.handle, size, STEP_TOKENS, others, lengths):
            self.core.close(request.handle)
            return False
        self.core.claim(request.handle, size + 150)
        request.computed = self.core.hit_tokens(request.handle)
        self.running.append(self.waiting.pop(0))
        return True

    def _release(self) -> None:
        for request in [r for r in self.running if r.generated >= r.output]:
            self.core.close(request.handle)
            self.running.remove(request)

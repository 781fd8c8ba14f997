"""An engine under a calibration's control, which brings about any step and times it.

To time a step of 32 decodes at 2,048 tokens of context, the calibration need not compute 65,536
tokens first. The model skips its forward passes until the requests reach the step's start:
scheduler, memory core, tables and sampling work as always, keys and values are arbitrary bytes of
the pool. The step itself runs in full.

::

    request ──skipped steps──► n decodes at S ──┬── timed steps (decode)
            ──skipped steps──► prefix of c ─────┴── a prompt of c + x arrives: one timed step
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvell.clock import Clock
from kvell.cost.work import Chunk
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Cancel, Event, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.vocabulary import RequestId

ENDLESS_TOKENS = 1 << 20


class CannotTimeError(RuntimeError):
    """The engine can run no step that a calibration times."""


class SkippingModel:
    """A model that returns zeros without computing while ``skips`` is set."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self.skips = False

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits, float32 [rows, vocab] (see :meth:`PagedModel.forward`)."""
        if not self.skips:
            return self._model.forward(batch)
        shape = (len(batch.logits_rows), self._model.description.vocab_size)
        return torch.zeros(1, device=self._model.device).expand(shape)

    @property
    def whole(self) -> PagedModel:
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class WatchedRunner:
    """A runner that keeps the last plan."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plan: StepPlan | None = None

    def run(self, plan: StepPlan) -> StepResult:
        self.plan = plan
        return self._runner.run(plan)


@dataclass(frozen=True)
class TimedStep:
    """One step of the engine, planning and committing included."""

    work: tuple[Chunk, ...]
    seconds: float


class Rig:
    """An engine that is brought to the start of a step, and timed.

    :param engine: over ``model``; it has no other user.
    :param seed: the seed of the prompts, which share no prefix unless a step is meant to hit one.
    """

    def __init__(self, engine: Engine, model: SkippingModel, clock: Clock, seed: int = 0) -> None:
        self._engine, self._model, self._clock = engine, model, clock
        self._watched = WatchedRunner(engine.runner)
        engine.runner = self._watched
        self._draw = np.random.default_rng(seed)
        self._vocab = model.description.vocab_size
        self._next_id = 0
        self._running: list[RequestId] = []
        self._events: list[Event] = []

    def decoding(self, contexts_tokens: Sequence[int]) -> None:
        """Decode one request per context, each of about the given length, and no other request."""
        self.clear()
        for tokens in contexts_tokens:
            self._running.append(self._submit(self._prompt(tokens), ENDLESS_TOKENS))
        if not self._running:
            return
        self._model.skips = True
        while self._engine.core.counters.num_waiting or not self._all_decode():
            self._engine.step()
        self._model.skips = False

    def step(self) -> TimedStep:
        started = self._clock.now_seconds()
        self._events = self._engine.step()
        seconds = self._clock.now_seconds() - started
        plan = self._watched.plan
        assert plan is not None
        work = tuple(Chunk(each.start, each.count, each.num_logits) for each in plan.work)
        return TimedStep(work, seconds)

    def prefill(self, cached_tokens: int, new_tokens: int) -> TimedStep:
        """Time the first step of a prompt whose first ``cached_tokens`` tokens are cached."""
        request = self._come(cached_tokens, new_tokens)
        timed = self.step()
        self._engine.handle(Cancel(request))
        return timed

    def first_token_seconds(self, cached_tokens: int, new_tokens: int) -> float:
        """Time all steps of such a prompt, up to its first token: exec(x, y)."""
        request = self._come(cached_tokens, new_tokens)
        seconds = self.step().seconds
        while not any(
            isinstance(event, Tokens) and event.request_id == request for event in self._events
        ):
            seconds += self.step().seconds
        self._engine.handle(Cancel(request))
        return seconds

    def clear(self) -> None:
        for request in self._running:
            self._engine.handle(Cancel(request))
        self._running = []

    def _come(self, cached_tokens: int, new_tokens: int) -> RequestId:
        prefix = self._prompt(cached_tokens)
        if cached_tokens:
            self._finish(prefix)
        return self._submit(np.concatenate([prefix, self._prompt(new_tokens)]), ENDLESS_TOKENS)

    def _finish(self, prompt: Any) -> None:
        request = self._submit(prompt, 1)
        self._model.skips = True
        while not any(
            isinstance(event, Finished) and event.request_id == request
            for event in self._engine.step()
        ):
            pass
        self._model.skips = False

    def _all_decode(self) -> bool:
        plan = self._watched.plan
        return plan is not None and all(each.count == 1 for each in plan.work)

    def _prompt(self, tokens: int) -> Any:
        return self._draw.integers(0, self._vocab, tokens)

    def _submit(self, prompt: Any, max_tokens: int) -> RequestId:
        request = RequestId(f"calibrate-{self._next_id}")
        self._next_id += 1
        limit = max(1, self._engine.core.limits.max_model_len - len(prompt))
        sampling = SamplingParams(temperature=0, max_tokens=min(max_tokens, limit), ignore_eos=True)
        spec = RequestSpec(request, to_token_bytes(prompt), sampling)
        for event in self._engine.handle(Submit(spec)):
            if isinstance(event, Finished):
                raise CannotTimeError(f"the engine refused a request: {event.message}")
        return request

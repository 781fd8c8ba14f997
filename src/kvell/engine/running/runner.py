"""The runner of step plans, the only part of the engine that touches tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from msgspec import structs

from kvell.engine.failing.failures import StepFailed
from kvell.engine.requests.plan import (
    BorrowedPages,
    StepPlan,
    StepResult,
    TeamTime,
    TokenWork,
    verify,
)
from kvell.engine.running.batching import PageTables
from kvell.engine.running.copies.copies_under_pass import Copier, StepCopies
from kvell.engine.running.copies.page_mover import PageMover
from kvell.engine.running.drafter import Drafter
from kvell.engine.running.forward_batches import ForwardBatches
from kvell.engine.running.lent.queries import Queries
from kvell.engine.running.model_part import (
    NO_ROWS,
    DrawnBefore,
    ModelPart,
    in_turn,
    pending,
    pooled_rows,
    rows_of,
    with_extras,
)
from kvell.engine.running.slot_memory import SlotMemory
from kvell.engine.sampling.controls import Controls, SampledPart
from kvell.engine.sampling.draw import GREEDY, sample
from kvell.memory import Layout
from kvell.models.captured.passes import SlotStep
from kvell.models.captured.reasons import RECORDED, Reason
from kvell.models.captured.slots import DecodeRows
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.images.image_store import ImageStore
from kvell.models.paged_model import PagedModel
from kvell.pages.stages import Stage, num_written, stages_of

TellWritten = Callable[[tuple[int, ...], int], None]
"""A callback: a step's transfers (``StepPlan.streams``), and the last stage that is written."""


class WrittenSeams:
    """Callbacks that report the last written stage to ``tell``, and call other callbacks."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tell: Callable[[int], None],
        beside: LayerCallbacks | None = None,
    ) -> None:
        self._stages, self._tell, self._beside = stages, tell, beside
        self._told = 0

    def after_kv_write(self, layer: int) -> None:
        """Report the last written stage, if a stage has been completed."""
        if self._beside is not None:
            self._beside.after_kv_write(layer)
        written = num_written(self._stages, layer)
        if written > self._told:
            self._told = written
            self._tell(written - 1)

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        if self._beside is not None:
            self._beside.before_attend(layer, query)

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        if self._beside is not None:
            self._beside.after_attend(layer, output)


NANO = 1_000_000_000


class Runner(Protocol):
    """A runner of plans: :class:`ModelRunner`, or the simulator's, which answers from a trace."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan and return the sampled tokens.

        :raises StepFailed: if the step's work failed; the plan's copies of pages are then made.
        """
        ...


@runtime_checkable
class PreparingRunner(Runner, Protocol):
    """A runner that can prepare a step while the previous step runs."""

    def prepare(
        self, plan: StepPlan, begun: Callable[[], None] | None = None
    ) -> Callable[[], StepResult]:
        """Do all that needs neither the pool nor the tokens that the previous step draws.

        Return a function that does the rest.  Call it once, after the previous step, on any thread.

        :param begun: called by that function when only computation is left, maybe several times.
        """
        ...


class ModelRunner:
    """Models over one pool (uint8 [bytes], on the models' device).

    :param draft: a draft model for the first model, attached to the same pool.
    :param name: name of the first model; "" if it is the only one.
    :param beside: further models by name, attached to the same pool.
    :param slot_memory: sets the models' memory for a step, if activations share the pool.
    :param buffer: the CPU buffer (uint8 [bytes], host memory), if plans offload pages.
    :param controls: controls by model name; a model without them supports no grammar.
    :param spare_processor: whether a processor is free for copies while a pass computes; else
        copies precede it.
    :ivar copier: copies pages to the buffer and back, during passes if possible.
    :ivar tells_written: receives the progress of a pass whose pages are being pulled; None: it is
        not reported, nor is it with several models.
    :ivar stands: returns whether borrowed pages may still be read in place; None: no plan has such.
    :ivar queries: the passes' queries to creditors; None: there are none.
    :ivar is_ahead: whether the tokens of the step that was launched last come from the device.
    """

    is_ahead = False

    def __init__(
        self,
        model: PagedModel,
        layout: Layout,
        pool: torch.Tensor,
        draft: PagedModel | None = None,
        name: str = "",
        beside: Mapping[str, PagedModel] = MappingProxyType({}),
        slot_memory: SlotMemory | None = None,
        buffer: torch.Tensor | None = None,
        controls: Mapping[str, Controls] = MappingProxyType({}),
        spare_processor: bool = True,
    ) -> None:
        self._slot_memory = slot_memory
        self._layout = layout
        self._tables = PageTables(layout.groups)
        self.models = {
            served: (paged, self._batches_of(paged, served))
            for served, paged in {name: model, **beside}.items()
        }
        self.pages = PageMover(layout, pool, buffer)
        self.copier = Copier(
            self.pages,
            layout.groups,
            list(self.models),
            on_host=pool.device.type == "cpu",
            takes_images=any(paged.images is not None for paged, _ in self.models.values()),
            has_spare=spare_processor,
        )
        self._numbers = {served: number for number, served in enumerate(self.models)}
        self._controls = {served: controls.get(served) or Controls() for served in self.models}
        self._before = DrawnBefore()
        self.tells_written: TellWritten | None = None
        self.stands: Callable[[BorrowedPages], bool] | None = None
        self.queries: Queries | None = None
        self._stages = () if beside else stages_of(layout.groups, name)
        self._drafter: Drafter | None = None
        if draft is not None:
            batches = self._batches_of(draft, name, is_draft=True, images=model.images)
            self._drafter = Drafter(draft, layout, name, batches, self._controls[name])

    def run(self, plan: StepPlan) -> StepResult:
        return self._prepared(plan)()()

    def prepare(
        self, plan: StepPlan, begun: Callable[[], None] | None = None
    ) -> Callable[[], StepResult]:
        """Update the page tables and build the batches; the returned function does the rest.

        With a draft model it does all of that, since batches are built from draft tokens, and the
        tables must not change while the previous step builds its own.
        """
        launch = self._prepared(plan, begun) if self._drafter is None else None

        def run() -> StepResult:
            if launch is not None:
                return launch()()
            if begun is not None:
                begun()
            return self.run(plan)

        return run

    def _prepared(
        self, plan: StepPlan, begun: Callable[[], None] | None = None
    ) -> Callable[[], Callable[[], StepResult]]:
        """Prepare a step; the returned function launches it, and returns what waits for it."""
        self._tables.update(plan)
        try:
            parts = self._parts(plan, begun) if self._drafter is None else None
        except Exception as failure:
            return partial(self._fail, plan, failure)
        return partial(self._launched, plan, parts)

    def _launched(
        self, plan: StepPlan, parts: Mapping[str, ModelPart] | None
    ) -> Callable[[], StepResult]:
        with self.copier.begin(plan) as copies:
            try:
                return self._launch(plan, parts, copies)
            except Exception as failure:
                raise self._failed(plan) from failure

    def _failed(self, plan: StepPlan) -> StepFailed:
        self._before.fail(plan.step)
        return StepFailed(f"step {plan.step} failed")

    def _fail(self, plan: StepPlan, failure: Exception) -> Callable[[], StepResult]:
        """Make the copies of a plan whose work cannot be computed, and raise StepFailed."""
        with self.copier.begin(plan):
            raise self._failed(plan) from failure

    def _launch(
        self, plan: StepPlan, parts: Mapping[str, ModelPart] | None, copies: StepCopies
    ) -> Callable[[], StepResult]:
        """Compute a step; return a function that waits for its tokens, if a device is not done."""
        self.is_ahead = False
        if not plan.work:
            return partial(StepResult, plan.step, ())
        if self._slot_memory is not None and plan.slot is not None:
            self._slot_memory.use(plan.slot)
        if self.queries is not None:
            self.queries.begin(plan)
        if self._drafter is not None:
            plan = self._drafter.with_draft_tokens(plan, self.queries)
        parts = self._parts(plan) if parts is None else parts
        self.is_ahead = all(part.is_ahead for part in parts.values())
        drawn = {
            name: self._draw(name, part, self._seams(name, plan, copies))
            for name, part in parts.items()
        }
        return partial(self._finish, plan, drawn)

    def _finish(self, plan: StepPlan, parts: Mapping[str, Callable[[], SampledPart]]) -> StepResult:
        try:
            return self._taken(plan, {name: part() for name, part in parts.items()})
        except Exception as failure:
            raise self._failed(plan) from failure

    def _taken(self, plan: StepPlan, drawn: Mapping[str, SampledPart]) -> StepResult:
        tokens = {name: model_drawn.tokens for name, model_drawn in drawn.items()}
        in_order = next(iter(tokens.values())) if len(tokens) == 1 else in_turn(plan, tokens)
        result = with_extras(verify(plan, in_order), drawn)
        result = structs.replace(result, team=self._team(drawn))
        if plan.borrowed:
            lacking = () if self.queries is None else self.queries.lacking
            missed = tuple(sorted({*plan.find_missed(self.stands), *lacking}))
            result = structs.replace(result, missed=missed)
        self._before.note(plan, result)
        return result

    def _team(self, models: Iterable[str]) -> TeamTime | None:
        """Return the time of the compiled passes' threads, and the part that they lost."""
        passes = [passed for name in models if (passed := self.models[name][0].passed) is not None]
        if not passes:
            return None
        return TeamTime(
            threads=max(passed.way.threads for passed in passes),
            is_shared=any(passed.way.is_shared for passed in passes),
            thread_seconds=sum(passed.way.threads * passed.took_ns for passed in passes) / NANO,
            lost_seconds=sum(sum(passed.lost_ns) for passed in passes) / NANO,
        )

    def _parts(
        self, plan: StepPlan, begun: Callable[[], None] | None = None
    ) -> dict[str, ModelPart]:
        if len(self.models) == 1 and plan.work:
            (name,) = self.models
            return {name: self._part(name, plan.work, plan, begun)}
        by_model = {
            name: [work for work in plan.work if work.spec.model == name] for name in self.models
        }
        return {
            name: self._part(name, work, plan, begun) for name, work in by_model.items() if work
        }

    def _part(
        self,
        name: str,
        work: Sequence[TokenWork],
        plan: StepPlan,
        begun: Callable[[], None] | None,
    ) -> ModelPart:
        model, batches = self.models[name]
        rows = rows_of(work)
        controls = self._controls[name].begin(work)
        greedy = controls is None and all(row is GREEDY for row in rows)
        pooled = pooled_rows(work) if plan.pools else NO_ROWS
        recorded = None if model.captured is None else self._recorded(name, work, plan)
        batch = recorded or batches.batch(
            work,
            plan.checkpoints,
            wants_largest=greedy,
            begun=begun,
            wants_hidden=bool(pooled.rows),
        )
        is_recorded = isinstance(batch, SlotStep)
        awaited = NO_ROWS if isinstance(batch, SlotStep) and batch.takes_seats else pending(work)
        return ModelPart(work, batch, rows, awaited, controls, pooled, greedy and is_recorded)

    def _recorded(self, name: str, work: Sequence[TokenWork], plan: StepPlan) -> SlotStep | None:
        """Return a model's part of a step in a slot of its records; None if it must be computed."""
        model, batches = self.models[name]
        captured = model.captured
        if captured is None:
            return None
        takes_images = model.images is not None
        reason = why_computed(plan, work, drops=batches.drops, takes_images=takes_images)
        reason = Reason.FAILED if captured.has_failed else reason
        step = None if reason else captured.step(self._decode_rows(name, work))
        reason = reason or (Reason.TOO_LARGE if step is None else None)
        captured.counts[reason or RECORDED] += 1
        return step

    def _decode_rows(self, name: str, work: Sequence[TokenWork]) -> DecodeRows:
        _, batches = self.models[name]
        return batches.decode_rows(work)

    def _newest(self, handles: Sequence[int]) -> list[int]:
        return self._before.newest(handles)

    def _seams(self, name: str, plan: StepPlan, copies: StepCopies) -> LayerCallbacks | None:
        seams = copies.seams(name)
        if not plan.streams or self.tells_written is None or not self._stages:
            return seams
        return WrittenSeams(self._stages, partial(self.tells_written, plan.streams), seams)

    def _draw(
        self, name: str, part: ModelPart, seams: LayerCallbacks | None
    ) -> Callable[[], SampledPart]:
        """Compute one model's part of a step; return what waits for a token of each row."""
        model, _ = self.models[name]
        number = self._numbers[name]
        if part.pending.rows:
            part.batch.put_tokens(part.pending.rows, self._newest(part.pending.handles))
        if self.queries is not None:
            self.queries.expect(number, part.work)
        logits = model.forward(part.batch, *(() if seams is None else (seams,)))
        if self.queries is not None:
            self.queries.note(number, part.work)
        if isinstance(part.batch, SlotStep):
            if part.is_ahead:
                step = part.batch
                return lambda: SampledPart(step.tokens())  # waits for the device
            part.batch.wait()
        if part.controls is not None:
            drawn = part.controls.draw(logits, part.rows)
        else:
            drawn = SampledPart(model.largest(part.batch) or sample(logits, part.rows))
        if part.pooled.rows:
            drawn.pooled = part.pooled.vectors(model.hidden(part.batch))
        return lambda: drawn

    def _batches_of(
        self,
        model: PagedModel,
        name: str,
        *,
        is_draft: bool = False,
        images: ImageStore | None = None,
    ) -> ForwardBatches:
        groups = self._layout.indices_of(name, is_draft=is_draft)
        store = model.images or images
        return ForwardBatches(self._layout, self._tables, groups, model.device, store)


def why_computed(
    plan: StepPlan, work: Sequence[TokenWork], *, drops: bool, takes_images: bool
) -> Reason | None:
    """Return why a model's part of a step cannot be repeated from a record; None if it can."""
    if plan.pools:
        return Reason.HIDDEN
    if takes_images:
        return Reason.IMAGES
    if drops:
        return Reason.DROPPING
    if plan.away or plan.borrowed:
        return Reason.REMOTE
    if plan.streams:
        return Reason.SEAMS
    if len(plan.checkpoints):
        return Reason.CHECKPOINTS
    if any(item.proposed for item in work):
        return Reason.DRAFTS
    if any(item.uses_long_rope for item in work):
        return Reason.LONG_ROPE
    if not all(w.count == 1 and w.start > 0 and w.samples and w.scores is None for w in work):
        return Reason.PREFILL
    return None

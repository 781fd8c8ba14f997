"""Which copies go before a pass, which under it: bytes are as if all had been before it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from kvell.engine.requests.plan import NewPages, PageCopy, StepPlan, StepSlot, TokenWork
from kvell.engine.running.copies.copy_order import (
    CopyOrder,
    copy_order,
    has_spare_processor,
    why_before,
)
from kvell.engine.running.copies.page_mover import PageMover
from kvell.memory import GroupKind, GroupSpec, Layout
from kvell.pages.stages import BEFORE_ALL, stages_of
from kvell.vocabulary import PageId, StepNumber
from tests.depth import some
from tests.engine.works import work_of

FULL = GroupSpec("full", GroupKind.FULL, (0, 3, 4), 8, 4, 120, 2)
SLIDING = GroupSpec("sliding", GroupKind.SLIDING, (1, 2), 8, 4, 80, 3, window_tokens=8)
STATE = GroupSpec("state", GroupKind.STATE, (1,), 80, 1, 80, 3)
GROUPS = (FULL, SLIDING, STATE)
LARGES = 8
LAYOUT = Layout(GROUPS, 240, LARGES)
LAYERS = (0, 1, 2, 3, 4)


def work(model: str = "") -> TokenWork:
    return work_of("a", 0, 0, 1, model=model)


def rows(*found: tuple[int, int, int]) -> NewPages:
    return np.asarray(found, np.int32).reshape(-1, 3)


def new(*found: tuple[int, int]) -> NewPages:
    return np.asarray([(0, group, 0, page) for group, page in found], np.int32).reshape(-1, 4)


PLAN = StepPlan(StepNumber(1), work=(work(),))


def ordered(plan: StepPlan, groups: tuple[GroupSpec, ...] = GROUPS) -> CopyOrder:
    order = copy_order(plan, groups, on_host=True)
    assert order.why == ""
    return order


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_processor_is_left_if_the_pass_has_fewer_threads(processors: int, threads: int) -> None:
    assert has_spare_processor(processors, threads) == (processors - threads >= 1)


def test_without_a_processor_left_all_is_copied_before_the_pass() -> None:
    plan = replace(PLAN, offloads=rows((0, 1, 2)), fetches=rows((0, 3, 4)))
    assert ordered(plan).is_under_pass
    order = copy_order(plan, GROUPS, on_host=True, has_spare=False)
    assert "every processor" in order.why
    assert not order.is_under_pass
    assert np.array_equal(order.first_out, plan.offloads)
    assert np.array_equal(order.first_in, plan.fetches)


@pytest.mark.parametrize(
    ("plan", "groups", "on_host", "takes_images", "why"),
    [
        (PLAN, GROUPS, False, False, "GPU"),
        (StepPlan(StepNumber(1)), GROUPS, True, False, "nothing is computed"),
        (PLAN, GROUPS, True, True, "images"),
        (PLAN, (replace(FULL, is_draft=True),), True, False, "draft model"),
        (PLAN, (FULL, replace(FULL, kind=GroupKind.DROPPING)), True, False, "layer by layer"),
        (PLAN, (FULL, replace(FULL, kind=GroupKind.CROSS)), True, False, "layer by layer"),
    ],
)
def test_what_keeps_all_copies_before_the_pass_is_named(
    plan: StepPlan, groups: tuple[GroupSpec, ...], on_host: bool, takes_images: bool, why: str
) -> None:
    plan = replace(plan, offloads=rows((0, 1, 2)), fetches=rows((0, 5, 6)))
    assert why in why_before(plan, groups, on_host=on_host, takes_images=takes_images)
    order = copy_order(plan, groups, on_host=on_host, takes_images=takes_images)
    assert why in order.why
    assert not order.is_under_pass
    assert order.first_out.tolist() == plan.offloads.tolist()
    assert order.first_in.tolist() == plan.fetches.tolist()


def test_pages_go_out_before_activations_take_their_place() -> None:
    """A chunk that a page leaves may be the step's slot already; what comes in has no such end."""
    slot = replace(PLAN, slot=StepSlot(0, 1))
    assert "activations" in why_before(
        replace(slot, offloads=rows((0, 1, 2))), GROUPS, on_host=True
    )
    assert len(ordered(replace(slot, fetches=rows((0, 1, 2)))).layered_in) == 1


def test_a_page_that_nobody_writes_goes_out_last() -> None:
    order = ordered(replace(PLAN, offloads=rows((0, 1, 2), (2, 3, 0))))
    assert order.last_out.tolist() == [[0, 1, 2], [2, 3, 0]]


def test_a_page_that_its_own_group_takes_goes_out_by_layer() -> None:
    plan = replace(PLAN, offloads=rows((0, 1, 2), (1, 12, 13)), new_pages=new((0, 1)))
    order = ordered(plan)
    assert order.layered_out.tolist() == [[0, 1, 2]]
    assert order.last_out.tolist() == [[1, 12, 13]]


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, new_pages=new((1, 2))),
        replace(PLAN, fetches=rows((1, 20, 2))),
        replace(PLAN, checkpoints=np.asarray([[0, 2, 4, 0, 1]], np.int32)),
        replace(PLAN, copies=(PageCopy(0, PageId(9), PageId(1)),)),
        replace(PLAN, copies=(PageCopy(1, PageId(20), PageId(2)),)),
        replace(PLAN, fetches=rows((0, 4, 9))),
        replace(PLAN, fetches=rows((1, 6, 20))),
    ],
    ids=[
        "another group's page",
        "another group's page that comes in",
        "a state on the way",
        "a copy onto it",
        "another group's copy",
        "the same page of the buffer",
        "its large page of the buffer",
    ],
)
def test_a_page_whose_bytes_are_written_otherwise_goes_out_first(plan: StepPlan) -> None:
    """Page 1 of the first group shares a large page with pages 0 to 2 of the others."""
    assert ordered(replace(plan, offloads=rows((0, 1, 4)))).first_out.tolist() == [[0, 1, 4]]


def test_states_come_in_first_and_go_out_first_if_another_takes_their_page() -> None:
    plan = replace(
        PLAN,
        offloads=rows((2, 3, 0), (2, 6, 1)),
        fetches=rows((2, 9, 6), (0, 9, 9)),
        new_pages=new((2, 6), (0, 9)),
    )
    order = ordered(plan)
    assert order.first_out.tolist() == [[2, 6, 1]]
    assert order.last_out.tolist() == [[2, 3, 0]]
    assert order.first_in.tolist() == [[2, 9, 6]]
    assert order.layered_in.tolist() == [[0, 9, 9]]


def test_a_page_that_is_copied_on_comes_in_first() -> None:
    plan = replace(
        PLAN, fetches=rows((0, 1, 2), (0, 3, 4)), copies=(PageCopy(0, PageId(2), PageId(7)),)
    )
    order = ordered(plan)
    assert order.first_in.tolist() == [[0, 1, 2]]
    assert order.layered_in.tolist() == [[0, 3, 4]]


def test_pages_of_a_model_that_does_not_compute_are_not_split() -> None:
    groups = (replace(FULL, model="a"), replace(FULL, model="b", name="b"))
    plan = replace(
        PLAN,
        work=(work("a"),),
        offloads=rows((1, 1, 2), (1, 6, 9)),
        fetches=rows((1, 4, 6), (0, 0, 14)),
    )
    order = ordered(plan, groups)
    assert order.first_in.tolist() == [[1, 4, 6]]
    assert order.layered_in.tolist() == [[0, 0, 14]]
    assert order.first_out.tolist() == [[1, 6, 9]]
    assert order.last_out.tolist() == [[1, 1, 2]]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8])
def test_stages_cover_every_byte_of_a_page_once(most: int) -> None:
    stages = stages_of(GROUPS, most=most)
    assert len(stages) == min(most, len(LAYERS))
    for index, group in enumerate(GROUPS[:2]):
        parts = [stage.parts[index] for stage in stages if index in stage.parts]
        assert parts[0][0] == 0
        assert parts[-1][1] == group.page_bytes
        assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
    assert all(2 not in stage.parts for stage in stages)


def test_a_stage_is_needed_behind_the_last_layer_of_the_one_before() -> None:
    sparse = (replace(FULL, layers=(3, 11, 19)), STATE)
    assert [stage.after_layer for stage in stages_of(sparse)] == [BEFORE_ALL, 3, 11]
    assert [stage.after_layer for stage in stages_of(sparse, most=2)] == [BEFORE_ALL, 3]
    assert stages_of((STATE,)) == ()
    assert stages_of(sparse, "another") == ()


@dataclass
class Memory:
    """Pool and buffer, and a pass over them that reads and writes its pages layer by layer."""

    pool: torch.Tensor
    buffer: torch.Tensor

    @classmethod
    def random(cls, seed: int) -> "Memory":
        draw = torch.Generator().manual_seed(seed)
        return cls(
            *(
                torch.randint(0, 256, (LAYOUT.pool_bytes,), generator=draw, dtype=torch.uint8)
                for _ in range(2)
            )
        )

    @property
    def mover(self) -> PageMover:
        return PageMover(LAYOUT, self.pool, self.buffer)

    def compute(self, layer: int, read: NewPages, written: NewPages) -> list[bytes]:
        """What the layer reads of pages [m, 2]; then it writes its part of others."""
        found = [self._part(layer, *row).numpy().tobytes() for row in read.tolist()]
        for number, row in enumerate(written.tolist()):
            self._part(layer, *row).fill_(7 * layer + number)
        return found

    def _part(self, layer: int, index: int, page: int) -> torch.Tensor:
        group = GROUPS[index]
        if layer not in group.layers:
            return self.pool[:0]
        begin = page * group.page_stride_bytes + group.layer_offset_bytes(layer)
        return self.pool[begin : begin + group.layer_page_bytes]


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, NewPages]:
    """A plan that a scheduler could make, and the pages (group, page) that its pass reads.

    Some pages leave; large pages that are empty then may change their group; what is free then is
    fetched, copied onto, or new; all that is left is read.
    """
    owner = draw(st.lists(st.sampled_from((0, 1, 2)), min_size=LARGES, max_size=LARGES))
    old = [page for large in range(LARGES) for page in pages_of(owner[large], large)]
    out = [page for page in old if draw(st.booleans())]
    kept = [page for page in old if page not in out]
    dropped = [page for page in kept if draw(st.integers(0, 5)) == 0]
    kept = [page for page in kept if page not in dropped]
    after = [
        owner[large]
        if any(page in kept for page in pages_of(owner[large], large))
        else draw(st.sampled_from((0, 1, 2)))
        for large in range(LARGES)
    ]
    free = [p for large in range(LARGES) for p in pages_of(after[large], large) if p not in kept]
    uses = [(page, draw(st.sampled_from(("fetch", "copy", "new", "empty")))) for page in free]
    held = iter(draw(st.permutations(range(LARGES))))
    buffered = {index: list(pages_of(index, next(held))) for index in (0, 1, 2)}
    more = {index: list(pages_of(index, next(held))) for index in (0, 1, 2)}
    offloads = [(g, p, more[g].pop()[1]) for g, p in out if more[g]]
    sources = {g: buffered[g] + [(g, h) for o, _, h in offloads if o == g] for g in (0, 1, 2)}
    fetches, copies, taken = [], [], list[tuple[int, int]]()
    for page, use in uses:
        if use == "fetch" and sources[page[0]]:
            fetches.append((page[0], sources[page[0]].pop()[1], page[1]))
            taken.append(page)
        if use == "new":
            taken.append(page)
    for page, use in uses:
        readable = [
            other for other in kept + [(g, p) for g, _, p in fetches] if other[0] == page[0]
        ]
        if use == "copy" and readable:
            copies.append(
                PageCopy(page[0], PageId(draw(st.sampled_from(readable))[1]), PageId(page[1]))
            )
            taken.append(page)
    gone = [(g, p) for g, p, _ in offloads]
    left = [page for page in out if page in gone and after[large_of(page)] == page[0]]
    read = kept + taken + [page for page in left if page not in taken]
    plan = replace(
        PLAN,
        offloads=rows(*offloads),
        fetches=rows(*fetches),
        copies=tuple(copies),
        new_pages=new(*taken),
    )
    return plan, np.asarray(read, np.int32).reshape(-1, 2)


def pages_of(index: int, large: int) -> Iterator[tuple[int, int]]:
    count = GROUPS[index].pages_per_large
    return ((index, page) for page in range(large * count, (large + 1) * count))


def large_of(page: tuple[int, int]) -> int:
    return page[1] // GROUPS[page[0]].pages_per_large


def writes(plan: StepPlan) -> NewPages:
    """A state is written when its layer is computed, like a layer's part of other pages."""
    return plan.new_pages[:, [1, 3]]


def in_turn(plan: StepPlan, read: NewPages, memory: Memory) -> list[list[bytes]]:
    memory.mover.offload(plan.offloads)
    memory.mover.fetch(plan.fetches)
    memory.mover.copy(plan.copies)
    return [memory.compute(layer, read, writes(plan)) for layer in LAYERS]


def under(
    plan: StepPlan, read: NewPages, memory: Memory, most: int, early: st.DataObject | None
) -> list[list[bytes]]:
    """As late as a copier may be, or as early as drawn."""
    order, mover = ordered(plan), memory.mover
    stages, copied, seen = stages_of(GROUPS, most=most), 0, []
    out, back = (
        mover.pieces(order.layered_out, is_out=True),
        mover.pieces(order.layered_in, is_out=False),
    )
    mover.offload(order.first_out)
    mover.fetch(order.first_in)
    mover.copy(plan.copies)
    for layer in LAYERS:
        due = sum(stage.after_layer < layer for stage in stages)
        if early is not None:
            due = early.draw(st.integers(due, len(stages)), f"stages before layer {layer}")
        for stage in stages[copied : max(copied, due)]:
            mover.move_parts(out, stage.parts, is_out=True)
            mover.move_parts(back, stage.parts, is_out=False)
        copied = max(copied, due)
        seen.append(memory.compute(layer, read, writes(plan)))
    mover.offload(order.last_out)
    return seen


def data_of(memory: Memory, plan: StepPlan) -> list[bytes]:
    """All bytes that anybody may read: the pool's, and what lies in pages of the buffer, each
    without the padding behind it."""
    held = [
        memory.buffer[page * GROUPS[g].page_stride_bytes :][: GROUPS[g].page_bytes]
        for g, _, page in plan.offloads.tolist()
    ]
    mine = [
        memory.pool[page * GROUPS[g].page_stride_bytes :][: GROUPS[g].page_bytes]
        for g, page in writes(plan).tolist()
    ]
    return [some.numpy().tobytes() for some in held + mine]


@some()
@given(plans(), st.integers(1, 5), st.booleans(), st.data())
def test_nobody_can_tell_when_pages_were_copied(
    made: tuple[StepPlan, NewPages], most: int, is_late: bool, data: st.DataObject
) -> None:
    plan, read = made
    order = ordered(plan)
    event(f"under the pass: {order.is_under_pass}")
    event(f"out by layer: {bool(len(order.layered_out))}, first: {bool(len(order.first_out))}")
    parts = (order.first_out, order.layered_out, order.last_out)
    assert sorted(map(tuple, np.concatenate(parts).tolist())) == sorted(
        map(tuple, plan.offloads.tolist())
    )
    expected, found = Memory.random(1), Memory.random(1)
    seen = in_turn(plan, read, expected)
    assert under(plan, read, found, most, None if is_late else data) == seen
    assert data_of(found, plan) == data_of(expected, plan)

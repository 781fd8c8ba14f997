"""Memory of a GPU that KV and activations share: nothing is unmapped that a step may still touch.

The real chunks of a GPU are under the real balloon and scheduler, over a faked driver.  A step is
launched when it is planned, and says what it touches; it ends when its result is wanted, or before.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from typing_extensions import override

from bench.gpu.cuda_chunks import CudaChunks
from kvell.elastic.arena import ActivationModel
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import Tiling
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.errors import TryLater
from kvell.memory import Layout, create_core
from kvell.vocabulary import MIB, StepNumber
from tests.depth import machine
from tests.device.faked_driver import GRANULARITY, FakedDriver
from tests.elastic.balloon_audit import audit_elastic
from tests.engine.planning.shared_traffic import Shared, full, longest
from tests.engine.traffic import limits


class TouchingDriver(FakedDriver):
    """A driver that fails the test if a launch, or an unmapping, would be a fault on a GPU.

    :ivar unfinished: by step, the addresses of the mappings that it may still read or write.
    :ivar unmapped: mappings undone so far.
    """

    def __init__(self, granularity: int = GRANULARITY) -> None:
        super().__init__(granularity)
        self.unfinished = defaultdict[int, set[int]](set)
        self.unmapped = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left: no memory, no address, no step."""
        return not (self.mapped or self.handles or self.reserved or self.unfinished)

    def touch(self, address: int, size_bytes: int, step: int) -> None:
        """Launch work of a step that reads or writes these bytes."""
        first = address // self.granularity * self.granularity
        mappings = set(range(first, address + size_bytes, self.granularity))
        assert mappings <= self.allowed, f"step {step} touches what is not mapped"
        self.unfinished[step] |= mappings

    def finish(self, step: int) -> None:
        for started in [started for started in self.unfinished if started <= step]:
            del self.unfinished[started]

    @override
    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        end = ptr + size
        touching = [
            step for step, at in self.unfinished.items() if any(ptr <= one < end for one in at)
        ]
        assert not touching, f"unmapped while steps {touching} may touch it"
        answer = super().cuMemUnmap(ptr, size)
        self.unmapped += answer[0] == self.CUresult.CUDA_SUCCESS
        return answer


LARGE = 24
TOKENS_A_CHUNK = 2
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")


def layout_of(large_page_bytes: int) -> Layout:
    """Pages of four tokens, four in a large page, as large as those of a big model."""
    small = full(LARGE)
    stride_bytes = large_page_bytes // small.groups[0].pages_per_large
    groups = tuple(replace(group, page_stride_bytes=stride_bytes) for group in small.groups)
    return replace(small, groups=groups, large_page_bytes=large_page_bytes)


class Touching(Shared):
    """Traffic over a GPU's chunks, whose steps are launched when they are planned."""

    def __init__(
        self, driver: TouchingDriver, depth: int, larges: float = 1, committed: int | None = None
    ) -> None:
        self.driver, self.under_way = driver, deque[StepPlan]()
        chunk_bytes = driver.granularity
        layout = layout_of(round(larges * chunk_bytes))
        model = ActivationModel(0, chunk_bytes // TOKENS_A_CHUNK, 0)
        most = min(64, longest(layout, model, chunk_bytes))
        chosen = Limits(**{**vars(limits(max_len=most)), "depth": depth})
        make = partial(make_chunks, driver)
        super().__init__(layout, chosen, model, chunk_bytes, make, committed)

    def launch(self) -> None:
        plan = self.plan()
        self.under_way.append(plan)
        chunk_bytes, touch = self.device.chunk_bytes, partial(self.driver.touch, step=plan.step)
        if plan.slot is not None:
            start = self.elastic.area.address + plan.slot.start * chunk_bytes
            touch(start, plan.slot.num_chunks * chunk_bytes)
        for work in plan.work:
            for _, index, _, page in self.core.memory.held_pages(work.handle).tolist():
                stride_bytes = self.layout.groups[index].page_stride_bytes
                touch(self.device.home.address + page * stride_bytes, stride_bytes)

    def step(self) -> list[tuple[str, int, int]]:
        """Plan and launch what may be; then wait for the oldest step, and commit it."""
        while self.core.may_plan:
            self.launch()
        plan = self.under_way.popleft()
        self.driver.finish(plan.step)
        self.finish_step(plan)
        return []

    def close(self) -> None:
        self.run()
        self.device.close()
        assert self.driver.is_empty


def make_chunks(driver: TouchingDriver, num_chunks: int, chunk_bytes: int) -> CudaChunks:
    chunks = CudaChunks(num_chunks, driver=driver)
    assert chunks.chunk_bytes == chunk_bytes
    return chunks


class Unmapping(RuleBasedStateMachine):
    """Requests come and are cancelled, the driver refuses now and then."""

    @initialize(
        granularity=st.sampled_from([2, 3, 4]),
        larges=st.sampled_from([0.5, 1, 2]),
        depth=st.sampled_from([0, 1, 1]),
        committed=st.integers(8, LARGE // 2),
    )
    def begin(self, granularity: int, larges: float, depth: int, committed: int) -> None:
        self.driver = TouchingDriver(granularity * MIB)
        self.traffic = Touching(self.driver, depth, larges, committed)
        self.most = self.traffic.core.limits.max_model_len
        self.names = 0

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=40), outputs=st.integers(1, 12))
    def submit(self, prompt: Sequence[int], outputs: int) -> None:
        outputs = min(outputs, self.most - 1)
        self.names += 1
        self.traffic.submit(str(self.names), prompt[: self.most - outputs], outputs)

    @precondition(lambda self: self.names)
    @rule(back=st.integers(0, 3))
    def cancel(self, back: int) -> None:
        self.traffic.cancel(str(max(1, self.names - back)))

    @precondition(lambda self: self.traffic.core.has_work)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times * self.traffic.core.has_work):
            if self.traffic.core.has_work:
                self.traffic.step()

    @precondition(lambda self: self.traffic.under_way)
    @rule()
    def end_early(self) -> None:
        """The device is done before the result is wanted."""
        self.driver.finish(self.traffic.under_way[0].step)

    @rule(call=st.sampled_from(CALLS), after=st.integers(0, 3))
    def refuse(self, call: str, after: int) -> None:
        self.driver.refuse = {call: after}

    @precondition(lambda self: not self.traffic.shared.is_complete)
    @rule(count=st.integers(1, 4))
    def warm(self, count: int) -> None:
        """More chunks get memory while requests run; what is refused is tried again later."""
        with contextlib.suppress(TryLater):
            self.traffic.core.step_memory.warm(count)
        assert audit_elastic(self.traffic.elastic) == []

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.driver.refuse = {}
            if not self.traffic.shared.is_complete:
                self.traffic.core.step_memory.warm(LARGE * 2)
            self.traffic.close()


TestUnmapping = Unmapping.TestCase
TestUnmapping.settings = machine(30, weight=0.3)


def gives_back(depth: int, behind: int | None = None) -> TouchingDriver:
    """A prefill takes chunks that others' pages then take back, while it may still run.

    :param behind: also unmap at the end of each plan, as if the step so many before it was the last
        one that is done; None: unmapping waits for the next plan.
    """
    driver = TouchingDriver(2 * MIB)
    traffic = Touching(driver, depth)
    if behind is not None:
        grant, elastic = traffic.shared.grant_activations, traffic.elastic

        def granted(step: StepNumber, tokens: int, rows: int) -> bool:
            is_granted = grant(step, tokens, rows)
            elastic.tend(step - behind)
            return is_granted

        traffic.shared.grant_activations = granted  # type: ignore[method-assign]
    traffic.submit("a", range(32), max_tokens=12)
    traffic.step()
    for index in range(7):
        traffic.submit(f"b{index}", [index, *range(30)], max_tokens=12)
    traffic.close()
    return driver


@pytest.mark.parametrize(("depth", "behind"), [(0, None), (1, None), (0, 1), (1, 2)])
def test_what_kv_took_is_unmapped_once_its_last_step_is_committed(
    depth: int, behind: int | None
) -> None:
    assert gives_back(depth, behind).unmapped > 0


def test_unmapping_after_the_step_that_was_started_last_is_caught() -> None:
    with pytest.raises(AssertionError, match="may touch it"):
        gives_back(1, behind=1)


def test_a_touch_of_what_is_not_mapped_is_caught() -> None:
    driver = TouchingDriver(2 * MIB)
    chunks = make_chunks(driver, 2, 2 * MIB)
    with pytest.raises(AssertionError, match="not mapped"):
        driver.touch(chunks.home.address, 1, step=1)
    chunks.close()


@pytest.mark.parametrize(
    ("call", "after"), [("cuMemAddressReserve", 0), *((call, 1) for call in CALLS[:3])]
)
def test_a_start_that_is_refused_leaves_nothing(call: str, after: int) -> None:
    driver = TouchingDriver(2 * MIB)
    layout = layout_of(2 * MIB)
    chunks = make_chunks(driver, LARGE, 2 * MIB)
    driver.refuse = {call: after}
    with pytest.raises(TryLater):
        ElasticMemory(chunks, create_core(layout), Tiling(LARGE, 2 * MIB, 2 * MIB, LARGE))
    chunks.close()
    assert driver.is_empty

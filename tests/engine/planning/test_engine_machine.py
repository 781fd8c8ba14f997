"""The engine core under random traffic: every answer right, every step audited."""

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, JournaledCore, replay
from kvell.engine.protocol.messages import Cancel, Event, Finished, Tokens
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import longest_request
from kvell.pages.audit import audit
from kvell.pages.layout import GroupSpec, Layout
from kvell.vocabulary import RequestId
from tests.engine.conftest import EOS, make_engine_core, make_submit
from tests.engine.virtual_model import VOCAB, VirtualModel, expected_output, expected_vector
from tests.pages.pools import group, pool_of

STEPS_A_REQUEST = 80
"""Step limit per request: if a device refuses every second mapping, they run one by one."""


class EngineMachine(RuleBasedStateMachine):
    """Submit, cancel, step; small pools, shared prefixes, cancels in flight."""

    depth = 0
    common_pool = False
    words = VOCAB
    num_speculative_tokens = 0
    has_drafter = False
    prompt_lookup_max = 5
    may_rest = False
    """Whether a step may do nothing, or keep pages for postponed work, though requests wait."""

    @initialize(
        groups=st.lists(
            st.builds(
                group, st.sampled_from([2, 4]), st.integers(1, 7), st.sampled_from([0, 0, 5, 9, 14])
            ),
            min_size=1,
            max_size=3,
        ),
        num_large=st.integers(3, 26),
        batched=st.sampled_from([3, 7, 32]),
        seats=st.integers(1, 6),
    )
    def start(self, groups: list[GroupSpec], num_large: int, batched: int, seats: int) -> None:
        self.layout: Layout = pool_of(num_large, *groups)
        chosen = Limits(
            max_num_batched_tokens=max(batched, seats),
            max_num_seqs=seats,
            max_model_len=max(2, longest_request(self.layout, 44, 4)),
            vocab_size=50,
            min_chunk_tokens=4,
            max_prefix_wait_steps=5,
            depth=self.depth,
            common_pool=self.common_pool,
            common_pool_chunk_tokens=4,
            common_pool_share=0.6,
            num_speculative_tokens=self.num_speculative_tokens,
            has_drafter=self.has_drafter,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=1,
        )
        self.limits = self.adjusted(chosen)
        self.journal = Journal()
        self.engine = JournaledCore(self.fresh(), self.journal)
        self.model = VirtualModel(self.layout, words=self.words)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.ends_early: set[str] = set()
        self.pooled: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.count = 0

    def adjusted(self, limits: Limits) -> Limits:
        """The limits of this machine's engines."""
        return limits

    def fresh(self) -> EngineCore:
        """An engine that has done nothing."""
        return make_engine_core(self.layout, self.limits)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 42),
        tail=st.lists(st.integers(0, 49), max_size=6),
        max_tokens=st.integers(1, 25),
        salted=st.booleans(),
        ends_early=st.booleans(),
        pools=st.sampled_from([False, False, True]),
    )
    def submit(
        self,
        family: int,
        length: int,
        tail: list[int],
        max_tokens: int,
        salted: bool,
        ends_early: bool,
        pools: bool,
    ) -> None:
        prompt = [(family * 7 + i * i) % 50 for i in range(length)] + tail
        name = f"q{self.count}"
        self.count += 1
        self.prompts[name] = (prompt, max_tokens)
        self.outputs[name] = []
        salt = "s" if salted else ""
        if pools:
            self.pooled.add(name)
            command = make_submit(name, prompt, max_tokens, salt=salt, pooling="last")
        else:
            command = make_submit(name, prompt, max_tokens, salt=salt, ignore_eos=not ends_early)
        if ends_early and not pools:
            self.ends_early.add(name)
        self.take(self.engine.tell(command))

    @rule()
    def step(self) -> None:
        if self.engine.core.has_work:
            self.plan_ahead()
            self.commit()

    @rule()
    def plan_ahead(self) -> None:
        """Plan as many steps as may be in flight at once."""
        while self.engine.core.may_plan:
            plan = self.engine.plan()
            self.check_plan(plan)
            self.in_flight.append(plan)
        assert len(self.in_flight) <= self.depth + 1

    @rule()
    def commit(self) -> None:
        """Commit the oldest step in flight, which may run as late as now."""
        if self.in_flight:
            self.take(self.engine.commit(self.model.run(self.in_flight.popleft())))

    @rule(pick=st.integers(0, 99), in_flight=st.booleans())
    def cancel(self, pick: int, in_flight: bool) -> None:
        names = sorted(self.prompts)
        if not names:
            return
        command = Cancel(RequestId(names[pick % len(names)]))
        if in_flight:
            self.plan_ahead()
        self.take(self.engine.tell(command))
        if in_flight:
            self.commit()

    def check_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        must_work = not self.in_flight and not plan.preempted and not self.may_rest
        assert plan.work or not must_work, "a step with work to do does none"
        assert len({work.request_id for work in plan.work}) == len(plan.work)
        assert not (plan.preempted and plan.admitted)
        draft_tokens = [work.proposed for work in plan.work]
        assert max(draft_tokens, default=0) <= self.num_speculative_tokens
        assert all(w.proposed <= (w.count - 1 if w.samples else 0) for w in plan.work)
        moved = {(copy.group, copy.target) for copy in plan.copies}
        computing = {work.handle for work in plan.work}
        for handle, index, _, page in plan.new_pages.tolist():
            given = handle in computing or (index, page) in moved or self.may_rest
            assert given, "pages for nothing"

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                assert event.first_index == len(self.outputs[event.request_id])
                assert event.request_id not in self.ended
                self.outputs[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished):
                assert event.request_id not in self.ended
                self.ended[event.request_id] = event
                self.check_answer(event)

    def check_answer(self, event: Finished) -> None:
        prompt, max_tokens = self.prompts[event.request_id]
        output = self.outputs[event.request_id]
        if event.request_id in self.pooled:
            self.check_vector(event, prompt)
            return
        assert output == expected_output(prompt, len(output), self.words)
        if event.request_id in self.ends_early:
            assert EOS not in output[:-1]
            assert (output[-1:] == [EOS]) == (event.reason == "stop")
        if event.reason == "length":
            room = self.limits.max_model_len - len(prompt)
            assert len(output) == min(max_tokens, room)
        if event.reason == "refused":
            assert len(prompt) >= self.limits.max_model_len
            assert "--max-model-len" in event.message

    def check_vector(self, event: Finished, prompt: list[int]) -> None:
        assert self.outputs[event.request_id] == []
        is_done = event.reason == "stop"
        assert event.embedding == (expected_vector(prompt) if is_done else b"")
        if event.reason == "refused":
            assert len(prompt) > self.limits.max_model_len
            assert "--max-model-len" in event.message
        assert event.reason in ("stop", "refused", "cancelled")

    @invariant()
    def audited(self) -> None:
        if hasattr(self, "engine"):
            assert audit(self.layout, self.engine.core.memory.snapshot()) == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(500 + STEPS_A_REQUEST * len(self.prompts)):
            if not self.engine.core.has_work:
                break
            self.step()
        assert set(self.ended) == set(self.prompts), "a request was lost"
        self.engine.core.let_go()
        state = self.engine.core.memory.snapshot()
        assert not any(state.used)
        assert replay(self.journal.entries, self.fresh()) == self.plans


FEW = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = FEW


class OverlappingMachine(EngineMachine):
    """Steps are planned while the one before runs: the same answers."""

    depth = 1


TestOverlappingMachine = OverlappingMachine.TestCase
TestOverlappingMachine.settings = FEW


class CommonPoolMachine(EngineMachine):
    """With protected shared prefixes: no request starves, and every lease ends."""

    common_pool = True


TestCommonPoolMachine = CommonPoolMachine.TestCase
TestCommonPoolMachine.settings = FEW


class OverlappingCommonPoolMachine(CommonPoolMachine):
    """Overlapping steps and protected prefixes."""

    depth = 1


TestOverlappingCommonPoolMachine = OverlappingCommonPoolMachine.TestCase
TestOverlappingCommonPoolMachine.settings = FEW


class SpeculatingMachine(EngineMachine):
    """With draft tokens, some of them right: the same answers."""

    words = 3
    num_speculative_tokens = 4
    prompt_lookup_max = 3


TestSpeculatingMachine = SpeculatingMachine.TestCase
TestSpeculatingMachine.settings = settings(FEW, max_examples=40)


class DraftingMachine(EngineMachine):
    """With draft tokens that are unknown when the step is planned: the same answers."""

    num_speculative_tokens = 3
    has_drafter = True


TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = settings(FEW, max_examples=40)


class LongDraftingMachine(DraftingMachine):
    """The same for minutes."""


TestDraftingMachineLong = pytest.mark.long(LongDraftingMachine.TestCase)
TestDraftingMachineLong.settings = settings(FEW, max_examples=1500)


class LongSpeculatingMachine(SpeculatingMachine):
    """The same for minutes."""


TestSpeculatingMachineLong = pytest.mark.long(LongSpeculatingMachine.TestCase)
TestSpeculatingMachineLong.settings = settings(FEW, max_examples=1500)


class LongEngineMachine(EngineMachine):
    """The same for minutes."""


TestEngineMachineLong = pytest.mark.long(LongEngineMachine.TestCase)
TestEngineMachineLong.settings = settings(FEW, max_examples=1500)


class LongCommonPoolMachine(CommonPoolMachine):
    """The same for minutes."""


TestCommonPoolMachineLong = pytest.mark.long(LongCommonPoolMachine.TestCase)
TestCommonPoolMachineLong.settings = settings(FEW, max_examples=1500)


class LongOverlappingMachine(OverlappingMachine):
    """The same for minutes."""


TestOverlappingMachineLong = pytest.mark.long(LongOverlappingMachine.TestCase)
TestOverlappingMachineLong.settings = settings(FEW, max_examples=1500)


class LongOverlappingCommonPoolMachine(OverlappingCommonPoolMachine):
    """The same for minutes."""


TestOverlappingCommonPoolMachineLong = pytest.mark.long(LongOverlappingCommonPoolMachine.TestCase)
TestOverlappingCommonPoolMachineLong.settings = settings(FEW, max_examples=1500)

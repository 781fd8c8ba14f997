"""Random traffic over an engine core, compared with a virtual model."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, PlanAsked, replay
from kvell.engine.planning.whole_prompts import without_chunks
from kvell.engine.protocol.messages import Cancel, Event, Finished, Tokens
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import longest_request
from kvell.pages.audit import audit
from kvell.pages.layout import GroupSpec, Layout
from kvell.vocabulary import RequestId
from tests.engine.conftest import EOS, make_engine_core, make_submit
from tests.engine.virtual_model import VOCAB, VirtualModel, expected_output, expected_vector
from tests.engine.works import with_spec
from tests.journaled import JournaledCore
from tests.pages.pools import group, pool_of

STEPS_A_REQUEST = 80


"""Step limit per request: if a device refuses every second mapping, they run one by one."""

LONGEST_TOKENS = 44

BOUNDS = (None, 1, 7)


"""On the prompt tokens of a step, step by step."""

Drafts = Literal["", "lookup", "drafter"]

DRAFTS: list[Drafts] = ["", "lookup", "drafter"]


@dataclass(frozen=True)
class Configuration:
    """What an engine is asked to do beside serving requests.

    :param depth: of planning: 1 plans a step while the one before runs.
    :param common_pool: shared prefixes are protected; no request starves, and every lease ends.
    :param whole_prompts: every step is one kind, and whoever is in it computes all that it has.
    :param drafts: who proposes draft tokens: some looked up are right; those of a draft model are
        unknown when the step is planned.
    """

    depth: int = 0
    common_pool: bool = False
    whole_prompts: bool = False
    drafts: Drafts = ""

    @property
    def words(self) -> int:
        """Size of the vocabulary: few words repeat themselves, so that lookups are right."""
        return 3 if self.drafts == "lookup" else VOCAB

    @property
    def num_speculative_tokens(self) -> int:
        return {"": 0, "lookup": 4, "drafter": 3}[self.drafts]

    def limits(self, layout: Layout, batched: int, seats: int) -> Limits:
        chosen = Limits(
            max_num_batched_tokens=max(batched, seats),
            max_num_seqs=seats,
            max_model_len=max(2, longest_request(layout, LONGEST_TOKENS, 4)),
            vocab_size=50,
            min_chunk_tokens=4,
            max_prefix_wait_steps=5,
            depth=self.depth,
            common_pool=self.common_pool,
            common_pool_chunk_tokens=4,
            common_pool_share=0.6,
            num_speculative_tokens=self.num_speculative_tokens,
            has_drafter=self.drafts == "drafter",
            prompt_lookup_max=3 if self.drafts == "lookup" else 5,
            prompt_lookup_min=1,
        )
        if not self.whole_prompts:
            return chosen
        batched = max(LONGEST_TOKENS, chosen.max_num_batched_tokens)
        return without_chunks(replace(chosen, max_num_batched_tokens=batched), layout)


CONFIGURATIONS = [
    Configuration(depth, common_pool, whole_prompts, drafts)
    for drafts, whole_prompts, common_pool, depth in product(
        DRAFTS, (False, True), (False, True), (0, 1)
    )
]


class EngineMachine(RuleBasedStateMachine):
    """Submit, cancel, step; small pools, shared prefixes, cancels in flight."""

    configurations: ClassVar[Sequence[Configuration]] = CONFIGURATIONS
    may_rest = False
    """Whether a step may do nothing, or keep pages for postponed work, though requests wait."""

    @initialize(
        data=st.data(),
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
    def start(
        self,
        data: st.DataObject,
        groups: list[GroupSpec],
        num_large: int,
        batched: int,
        seats: int,
    ) -> None:
        self.chosen = data.draw(st.sampled_from(self.configurations))
        self.layout: Layout = pool_of(num_large, *groups)
        self.limits = self.chosen.limits(self.layout, batched, seats)
        self.journal = Journal()
        self.engine = JournaledCore(self.fresh(), self.journal)
        self.model = self.make_model()
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.ends_early: set[str] = set()
        self.pooled: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.held: frozenset[RequestId] = frozenset()
        self.undrafted: frozenset[RequestId] = frozenset()
        self.count = 0

    def fresh(self) -> EngineCore:
        return make_engine_core(self.layout, self.limits)

    def make_model(self) -> VirtualModel:
        return VirtualModel(self.layout, words=self.chosen.words, is_late=True)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 42),
        tail=st.lists(st.integers(0, 49), max_size=6),
        max_tokens=st.integers(1, 25),
        salted=st.booleans(),
        ends_early=st.booleans(),
        pools=st.sampled_from([False, False, True]),
        looks_back=st.booleans(),
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
        looks_back: bool,
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
            penalty = 0.5 if looks_back else 0.0  # the model's tokens do not depend on it
            command = make_submit(
                name,
                prompt,
                max_tokens,
                salt=salt,
                ignore_eos=not ends_early,
                presence_penalty=penalty,
            )
        if ends_early and not pools:
            self.ends_early.add(name)
        tenant = "abc"[family % 3]
        self.take(self.engine.tell(with_spec(command, tenant=tenant)))

    @rule()
    def step(self) -> None:
        if self.engine.core.has_work:
            self.plan_ahead()
            self.commit()

    @rule()
    def plan_ahead(self) -> None:
        while self.engine.core.may_plan:
            bound = BOUNDS[self.engine.core.step % len(BOUNDS)]
            plan = self.engine.plan(PlanAsked(self.held, bound, self.undrafted))
            self.check_plan(plan)
            self.in_flight.append(plan)
        assert len(self.in_flight) <= self.chosen.depth + 1

    @rule()
    def commit(self) -> None:
        if self.in_flight:
            self.take(self.engine.commit(self.model.run(self.in_flight.popleft())))

    @rule(picks=st.sets(st.integers(0, 9)))
    def hold(self, picks: set[int]) -> None:
        names = sorted(self.prompts)
        self.held = frozenset(RequestId(names[pick]) for pick in picks if pick < len(names))
        self.engine.core.resume_held()

    @rule(picks=st.sets(st.integers(0, 9)))
    def stop_drafts(self, picks: set[int]) -> None:
        names = sorted(self.prompts)
        self.undrafted = frozenset(RequestId(names[pick]) for pick in picks if pick < len(names))

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
        assert not any(work.request_id in self.held for work in plan.work)
        assert self.held.isdisjoint(plan.admitted)
        assert not any(work.proposed and work.request_id in self.undrafted for work in plan.work)
        must_work = not (self.in_flight or plan.preempted or self.may_rest or self.held)
        assert plan.work or not must_work, "a step with work to do does none"
        assert len({work.request_id for work in plan.work}) == len(plan.work)
        assert set(plan.preempted).isdisjoint(plan.admitted)
        draft_tokens = [work.proposed for work in plan.work]
        assert max(draft_tokens, default=0) <= self.chosen.num_speculative_tokens
        assert all(w.proposed <= (w.count - 1 if w.samples else 0) for w in plan.work)
        moved = {(copy.group, copy.target) for copy in plan.copies}
        computing = {work.handle for work in plan.work}
        for handle, index, _, page in plan.new_pages.tolist():
            given = handle in computing or (index, page) in moved or self.may_rest
            assert given, "pages for nothing"
        if self.chosen.whole_prompts:
            self.check_whole(plan)

    def check_whole(self, plan: StepPlan) -> None:
        computed = {work.request_id for work in plan.work}
        assert set(plan.admitted) in (set(), computed), "prompts and decodes in one step"
        for work in plan.work:
            assert work.samples or work.pools, "a part of a prompt"
            assert work.request_id in plan.admitted or work.count - work.proposed == 1

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
        assert output == expected_output(prompt, len(output), self.chosen.words)
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
        self.hold(set())
        for _ in range(500 + STEPS_A_REQUEST * len(self.prompts)):
            if not self.engine.core.has_work:
                break
            self.step()
        assert set(self.ended) == set(self.prompts), "a request was lost"
        self.engine.core.scheduler.drop_reserves()
        state = self.engine.core.memory.snapshot()
        assert not any(state.used)
        assert replay(self.journal.entries, self.fresh()) == self.plans

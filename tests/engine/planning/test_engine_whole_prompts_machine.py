"""Steps of whole prompts or of decodes under random traffic: the same answers, nobody starves."""

from dataclasses import replace

import pytest
from hypothesis import settings

from kvell.engine.planning.whole_prompts import without_chunks
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from tests.engine.planning.test_engine_machine import FEW, EngineMachine

LONGEST_TOKENS = 44


class WholePromptsMachine(EngineMachine):
    """Every step is one kind, and whoever is in it computes all that it has."""

    def adjusted(self, limits: Limits) -> Limits:
        batched = max(LONGEST_TOKENS, limits.max_num_batched_tokens)
        return without_chunks(replace(limits, max_num_batched_tokens=batched), self.layout)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        computed = {work.request_id for work in plan.work}
        assert set(plan.admitted) in (set(), computed), "prompts and decodes in one step"
        for work in plan.work:
            assert work.samples or work.pools, "a part of a prompt"
            assert work.request_id in plan.admitted or work.count - work.proposed == 1


TestWholePromptsMachine = WholePromptsMachine.TestCase
TestWholePromptsMachine.settings = FEW


class OverlappingWholePromptsMachine(WholePromptsMachine):
    """Steps are planned while the one before runs."""

    depth = 1


TestOverlappingWholePromptsMachine = OverlappingWholePromptsMachine.TestCase
TestOverlappingWholePromptsMachine.settings = FEW


class CommonPoolWholePromptsMachine(WholePromptsMachine):
    """With protected shared prefixes, which are given up before a prompt is put off."""

    common_pool = True


TestCommonPoolWholePromptsMachine = CommonPoolWholePromptsMachine.TestCase
TestCommonPoolWholePromptsMachine.settings = settings(FEW, max_examples=40)


class SpeculatingWholePromptsMachine(WholePromptsMachine):
    """With draft tokens behind decodes."""

    words = 3
    num_speculative_tokens = 4
    prompt_lookup_max = 3


TestSpeculatingWholePromptsMachine = SpeculatingWholePromptsMachine.TestCase
TestSpeculatingWholePromptsMachine.settings = settings(FEW, max_examples=40)


class LongWholePromptsMachine(WholePromptsMachine):
    """The same for minutes."""


TestWholePromptsMachineLong = pytest.mark.long(LongWholePromptsMachine.TestCase)
TestWholePromptsMachineLong.settings = settings(FEW, max_examples=1500)


class LongOverlappingWholePromptsMachine(OverlappingWholePromptsMachine):
    """The same for minutes."""


TestOverlappingWholePromptsMachineLong = pytest.mark.long(
    LongOverlappingWholePromptsMachine.TestCase
)
TestOverlappingWholePromptsMachineLong.settings = settings(FEW, max_examples=1500)

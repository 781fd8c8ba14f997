"""A rig brings the engine to any step without computing what comes before."""

import pytest
import torch

from kvell.calibration.rig import Rig
from kvell.cost.model import prefill_seconds
from kvell.cost.work import Chunk
from kvell.models.paged_model import ForwardBatch, PagedModel
from tests.calibration.known import Known, known

ARCHITECTURES = ("LlamaForCausalLM", "Gemma3ForCausalLM", "FalconH1ForCausalLM")


@pytest.fixture(params=ARCHITECTURES)
def here(request: pytest.FixtureRequest) -> Known:
    return known(request.param)


@pytest.fixture
def computed(here: Known, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward pass that was not skipped."""
    found: list[int] = []
    forward = PagedModel.forward

    def watched(model: PagedModel, batch: ForwardBatch) -> torch.Tensor:
        found.append(len(batch.token_ids))
        return forward(model, batch)

    monkeypatch.setattr(PagedModel, "forward", watched)
    return found


def test_decodes_at_their_contexts(here: Known, computed: list[int]) -> None:
    rig = here.subject.rig(here.clock)
    rig.decoding([300, 300, 40])
    first, second = rig.step(), rig.step()
    assert [w.count for w in first.work] == [1, 1, 1]
    assert [w.start for w in first.work] == pytest.approx([301, 301, 41], abs=3)
    assert [w.start for w in second.work] == [w.start + 1 for w in first.work]
    assert computed == [3, 3]


def test_a_prompt_behind_its_cached_part(here: Known, computed: list[int]) -> None:
    rig = here.subject.rig(here.clock)
    rig.decoding([])
    timed = rig.prefill(128, 50)
    [work] = timed.work
    assert work.start + work.count == 178
    assert work.start == pytest.approx(128, abs=1)
    assert computed == [work.count]


def test_both_in_one_step(here: Known, computed: list[int]) -> None:
    rig = here.subject.rig(here.clock)
    rig.decoding([100, 100])
    timed = rig.prefill(0, 30)
    assert sorted(work.count for work in timed.work) == [1, 1, 30]
    again = rig.prefill(64, 30)
    assert len(again.work) == 3, "the prompt before is gone"
    assert len(computed) == 2


def test_a_step_is_timed(here: Known) -> None:
    rig = here.subject.rig(here.clock)
    rig.decoding([200])
    timed = rig.step()
    assert timed.seconds == pytest.approx(here.machine.step_seconds(timed.work))


def test_a_prompt_of_several_steps(here: Known, computed: list[int]) -> None:
    """exec(x, y) is all of them, 2,048 tokens at most in each."""
    rig = here.subject.rig(here.clock)
    seconds = rig.first_token_seconds(128, 3000)
    assert len(computed) == 2
    cached_ratio = (3128 - sum(computed)) / 3128
    assert seconds == pytest.approx(prefill_seconds(here.machine, 3128, cached_ratio), rel=1e-3)
    assert not here.subject.engine.core.has_work


def test_work_is_plain(here: Known) -> None:
    rig = here.subject.rig(here.clock)
    rig.decoding([16])
    assert all(isinstance(work, Chunk) for work in rig.step().work)
    rig.clear()
    assert not here.subject.engine.core.has_work


def test_what_the_engine_refuses(here: Known) -> None:
    rig: Rig = here.subject.rig(here.clock)
    with pytest.raises(RuntimeError, match="refused"):
        rig.decoding([100_000])

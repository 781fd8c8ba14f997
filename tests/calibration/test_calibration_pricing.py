"""An instance's prices: from a file that belongs to it, from its own steps, or none."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvell.calibration.kept import KeptCalibrations
from kvell.calibration.pricing import OwnPricing
from kvell.calibration.prints import machine_print, software_print
from kvell.calibration.subject import print_of
from kvell.clock import MonotonicClock
from kvell.cost.calibration import Calibration
from kvell.cost.prices import DEFAULT_PRICES
from kvell.cost.work import Chunk
from kvell.engine.protocol.messages import AskStats
from kvell.engine.protocol.statistics import Stats
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import quiet
from kvell.vocabulary import MIB
from tests.cost.made import MADE
from tests.models.fused_models import fused_model
from tests.models.harness import tiny_module

SETTINGS = EngineSettings("tiny", kv_memory_bytes=8 * MIB)


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return fused_model(tiny_module("LlamaForCausalLM"))


@pytest.fixture
def made(model: PagedModel) -> Calibration:
    return replace(
        MADE,
        machine=machine_print("cpu"),
        software=software_print(),
        model=print_of(model, "tiny"),
    )


def pricing(folder: Path, file: Path | None = None, transport: str = "memory") -> OwnPricing:
    clock = MonotonicClock()
    kept = KeptCalibrations(folder, clock)
    return OwnPricing(kept, clock, quiet, file, transport, budget_seconds=0.1)


def test_a_file_gives_its_prices(model: PagedModel, made: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_bytes(made.encode())
    prices = pricing(tmp_path, file)(model, "tiny", SETTINGS)
    assert prices.origin == "from here.json"
    assert prices.costs.request_seconds == made.step_seconds([Chunk(0, 1, 1)])
    assert prices.swap_bytes_per_second == 1e9
    assert not (tmp_path / "prices").exists()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model": MADE.model}, "of another model"),
        ({"machine": MADE.machine}, "processor was"),
        ({"machine": replace(machine_print("cpu"), threads=77)}, "threads was 77"),
        ({"software": MADE.software}, "code was"),
    ],
)
def test_a_file_of_others_is_refused(
    model: PagedModel, made: Calibration, tmp_path: Path, changed: dict[str, object], problem: str
) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(replace(made, **changed).encode())  # type: ignore[arg-type]
    with pytest.raises(ChangeSomething, match=problem) as refused:
        pricing(tmp_path, file)(model, "tiny", SETTINGS)
    assert (refused.value.field, refused.value.value) == ("--calibration", str(file))
    assert "kvell calibrate" in refused.value.remedy


def test_a_file_that_is_not_there(model: PagedModel, tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match="cannot be read"):
        pricing(tmp_path, tmp_path / "none.json")(model, "tiny", SETTINGS)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (replace(SETTINGS, quantization="int8"), "--quantization int8"),
        (replace(SETTINGS, kv_budget="64"), "--kv-budget 64"),
    ],
)
def test_steps_that_no_file_describes(
    model: PagedModel, made: Calibration, tmp_path: Path, settings: EngineSettings, flag: str
) -> None:
    file = tmp_path / "here.json"
    file.write_bytes(made.encode())
    with pytest.raises(ChangeSomething, match=flag):
        pricing(tmp_path, file)(model, "tiny", settings)


def test_steps_that_no_calibration_describes_keep_the_defaults(
    model: PagedModel, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, kv_budget="64")
    assert pricing(tmp_path)(model, "tiny", settings) == DEFAULT_PRICES


def test_a_pool_too_small_for_any_step_keeps_the_defaults(
    model: PagedModel, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, max_model_len=32)
    assert pricing(tmp_path)(model, "tiny", settings) == DEFAULT_PRICES


def test_own_prices_are_kept_for_the_same_threads(model: PagedModel, tmp_path: Path) -> None:
    first = pricing(tmp_path)(model, "tiny", SETTINGS)
    assert first.origin == "calibrated"
    assert pricing(tmp_path)(model, "renamed", SETTINGS) == first
    assert len(list((tmp_path / "prices").glob("*.json"))) == 1
    pricing(tmp_path)(model, "tiny", replace(SETTINGS, threads=1 + _threads()))
    assert len(list((tmp_path / "prices").glob("*.json"))) == 2


def _threads() -> int:
    return machine_print("cpu").threads


def test_pages_over_tcp_cost_more(model: PagedModel, made: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_bytes(made.encode())
    near = pricing(tmp_path, file)(model, "tiny", SETTINGS).costs
    far = pricing(tmp_path, file, "tcp")(model, "tiny", SETTINGS).costs
    assert far.fetch_token_seconds == pytest.approx(5 * near.fetch_token_seconds)


def test_answers_and_counters_are_those_of_an_engine_without_a_calibration(
    shallow_path: Path, tmp_path: Path
) -> None:
    clock = MonotonicClock()
    kept = KeptCalibrations(tmp_path, clock)
    own = OwnPricing(kept, clock, quiet, None, "memory", budget_seconds=0.4)
    answers: list[object] = []
    for used in (None, own):
        settings = EngineSettings(str(shallow_path), kv_memory_bytes=64 * MIB)
        with LLM(settings, pricing=used, seed=3) as llm:
            [before] = llm.engine.handle(AskStats())
            assert isinstance(before, Stats)
            assert (before.step, before.prompt_tokens, before.prefix_cache_queries) == (0, 0, 0)
            outputs = llm.generate([[5, 6, 7] * 40, [9] * 50])
            answers.append([(out.token_ids, out.cached_tokens) for out in outputs])
            facts = llm.engine.ready().facts
            assert facts.prices_origin == ("calibrated" if used else "defaults")
            assert (facts.prices != DEFAULT_PRICES.costs) == bool(used)
    assert answers[0] == answers[1]


def test_a_calibration_of_other_programs_is_dropped(model: PagedModel, tmp_path: Path) -> None:
    """The process got no processor time while its steps were timed."""
    busy = replace(pricing(tmp_path), process_seconds=lambda: 0.0)
    assert busy(model, "tiny", SETTINGS) == DEFAULT_PRICES
    assert pricing(tmp_path)(model, "tiny", SETTINGS).origin == "calibrated", "nothing was kept"

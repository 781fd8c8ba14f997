"""What serving adds, from what clients saw."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvell.calibration.serving import (
    BATCHES,
    LONG_PROMPT_TOKENS,
    LONG_PROMPTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    LongPrompt,
    ServingRound,
    fit_serving,
    measure_serving,
    server,
)
from kvell.cost.calibration import Serving
from kvell.cost.model import decode_seconds, prefill_seconds
from kvell.cost.work import Chunk
from kvell.errors import ChangeSomething
from kvell.models.sources.progress import quiet
from tests.cost.made import MADE

FAKE = Path(__file__).parents[1] / "fleet" / "fake_instance.py"


def seen(serving: Serving, batch: int, delay: float = 0.0) -> ServingRound:
    """What clients see of an engine like MADE, served at a price."""
    decode = decode_seconds(MADE, [PROMPT_TOKENS + OUTPUT_TOKENS // 2] * batch)
    first = prefill_seconds(MADE, PROMPT_TOKENS, 0.0) + serving.request_seconds
    added = serving.step_seconds + batch * serving.token_seconds
    return ServingRound(
        batch, first + serving.step_seconds + serving.token_seconds, decode + added + delay
    )


def test_prices_are_found() -> None:
    serving = Serving(4e-3, 5e-4, 2e-4)
    rounds = [seen(serving, batch) for batch in BATCHES for _ in range(3)]
    found = fit_serving(MADE, [*rounds, seen(serving, 4, delay=1.0)])
    assert found.request_seconds == pytest.approx(4e-3)
    assert (found.step_seconds, found.token_seconds) == pytest.approx((5e-4, 2e-4))


def test_what_a_prompts_tokens_cost_besides_is_found() -> None:
    serving = Serving(4e-3, 5e-4, 2e-4, 3e-5)
    rounds = [seen(replace(serving, request_seconds=4e-3), batch) for batch in BATCHES]
    served = replace(MADE, serving=serving).served_step_seconds([Chunk(0, 200, 1)])
    prompts = [LongPrompt(200, served + late + 4e-3) for late in (0.0, -1e-4, 0.5)]
    assert fit_serving(MADE, rounds, prompts).prompt_token_seconds == pytest.approx(3e-5)


def test_never_less_than_nothing() -> None:
    faster = [ServingRound(batch, 1e-6, 1e-6) for batch in BATCHES]
    found = fit_serving(MADE, faster, [LongPrompt(200, 1e-6)])
    assert found == Serving(0.0, 0.0, 0.0, 0.0)


def test_a_server_is_asked_and_ends() -> None:
    with server([sys.executable, str(Path(__file__).with_name("fake_server.py"))]) as url:
        found, prompts = measure_serving(url, 200, quiet, rounds=1)
    assert len(prompts) == LONG_PROMPTS
    assert {one.prompt_tokens for one in prompts} == {LONG_PROMPT_TOKENS}
    assert [one.batch for one in found] == list(BATCHES)
    assert all(one.ttft_seconds > 0 and one.tpot_seconds >= 0 for one in found)


def test_a_server_that_does_not_start() -> None:
    with (
        pytest.raises(ChangeSomething, match="the server did not start"),
        server([sys.executable, "-c", "raise SystemExit(2)"]),
    ):
        pass

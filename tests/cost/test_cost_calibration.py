"""Calibrations as files, and what schedulers ask: exec(x, y), equation 2, f(β) and g(S)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvell.cost.calibration import (
    decode_calibration,
    require_fresh,
)
from kvell.cost.model import (
    Fetch,
    attended_tokens_per_second,
    batch_seconds,
    decode_seconds,
    prefill_seconds,
)
from kvell.cost.parallel import Parallel
from kvell.cost.work import Work
from kvell.errors import ChangeSomething
from tests.cost.made import MACHINE, MADE, MODEL, SOFTWARE
from tests.cost.oracles import SHAPE, decodes, oracle, prompt


def test_there_and_back() -> None:
    assert decode_calibration(MADE.encode(), "file") == MADE


def test_readable_json() -> None:
    raw = json.loads(MADE.encode())
    assert raw["kvell_calibration"] == 1
    assert raw["model"]["name"] == "tiny"
    assert raw["held_out"]["decode_error"] == 0.03


def test_serving_comes_on_top() -> None:
    work = decodes(3, 50) + prompt(0, 20)
    engine = MADE.step_seconds(work)
    assert engine == oracle().step_seconds(work)
    assert MADE.served_step_seconds(work) == pytest.approx(engine + 1e-3 + 4 * 1e-4)


def test_over_several_devices() -> None:
    two = MADE.on(Parallel(2, link_bytes_per_second=1e12))
    assert prefill_seconds(two, 2000, 0.0) < prefill_seconds(MADE, 2000, 0.0)


def test_a_fetch_goes_at_the_rate_of_a_copy() -> None:
    assert MADE.fetch.seconds(10, "host") == MADE.operators.shape.stored_bytes(10) / 1e9


class TestRefused:
    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            (b"{", "not JSON"),
            (b"[1]", "not a calibration"),
            (b"{}", "not a calibration"),
            (b'{"kvell_calibration": 0}', "schema 0"),
            (b'{"kvell_calibration": 1}', "damaged"),
        ],
    )
    def test_files(self, data: bytes, problem: str) -> None:
        with pytest.raises(ChangeSomething, match=problem) as refused:
            decode_calibration(data, "some.json")
        assert (refused.value.field, refused.value.value) == ("--hardware", "some.json")
        assert "kvell calibrate" in refused.value.remedy

    def test_a_price_that_is_none(self) -> None:
        raw: dict[str, Any] = json.loads(MADE.encode())
        raw["operators"]["attention"]["pair_seconds"] = "much"
        with pytest.raises(ChangeSomething, match="damaged"):
            decode_calibration(json.dumps(raw).encode(), "file")

    def test_fresh(self) -> None:
        require_fresh(MADE, "file", replace(MODEL, name="same sizes"), MACHINE, SOFTWARE)

    def test_another_model(self) -> None:
        other = replace(MODEL, name="big", digest="0")
        with pytest.raises(ChangeSomething, match="tiny in bfloat16, not big in bfloat16"):
            require_fresh(MADE, "file", other, None, None)

    def test_stale(self) -> None:
        machine, software = replace(MACHINE, cores=8), replace(SOFTWARE, torch="2.14.0")
        with pytest.raises(ChangeSomething) as refused:
            require_fresh(MADE, "file", MODEL, machine, software)
        assert "cores was 2, is 8; torch was 2.13.0, is 2.14.0" in refused.value.problem
        require_fresh(MADE, "file", MODEL, None, None)


@dataclass
class Watched:
    """A second a step; remembers them."""

    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def step_seconds(self, work: Sequence[Work]) -> float:
        self.steps.append([(w.start, w.count, w.num_logits) for w in work])
        return 1.0


class TestPrefill:
    def test_chunks_beside_the_running_batch(self) -> None:
        watched = Watched()
        seconds = prefill_seconds(watched, 300, 0.5, running_tokens=(40, 50), chunk_tokens=102)
        assert seconds == 2.0
        assert watched.steps == [
            [(40, 1, 1), (50, 1, 1), (150, 100, 0)],
            [(41, 1, 1), (51, 1, 1), (250, 50, 1)],
        ]

    def test_the_last_token_is_computed_in_any_case(self) -> None:
        watched = Watched()
        prefill_seconds(watched, 300, 1.0)
        assert watched.steps == [[(299, 1, 1)]]

    def test_more_cached_is_never_slower(self) -> None:
        times = [prefill_seconds(oracle(), 2000, y / 10) for y in range(10)]
        assert times == sorted(times, reverse=True)

    def test_a_hit_on_the_host_is_fetched(self) -> None:
        fetch = Fetch(SHAPE, bytes_per_second=1e6)
        here = prefill_seconds(oracle(), 1000, 0.6)
        there = prefill_seconds(oracle(), 1000, 0.6, medium="host", fetch=fetch)
        assert there - here == pytest.approx((600 * 256 + 128 * 384) / 1e6)
        nothing = prefill_seconds(oracle(), 1000, 0.0, medium="host", fetch=fetch)
        assert nothing == prefill_seconds(oracle(), 1000, 0.0)

    @pytest.mark.parametrize(("tokens", "ratio"), [(0, 0.0), (10, 1.1), (10, -0.1)])
    def test_what_no_prompt_is(self, tokens: int, ratio: float) -> None:
        with pytest.raises(ValueError, match="no prompt"):
            prefill_seconds(oracle(), tokens, ratio)

    def test_a_hit_on_the_host_needs_a_price(self) -> None:
        with pytest.raises(ValueError, match="fetch"):
            prefill_seconds(oracle(), 10, 0.5, medium="host")


class TestEquation5:
    def test_a_step_is_batch_and_attention(self) -> None:
        """T(β, S) = T(β) + Σ S/g(S), where windows are full."""
        machine = oracle()
        batch = batch_seconds(machine, 8)
        assert decode_seconds(machine, [0] * 8) == batch
        whole = decode_seconds(machine, [3000] * 8) - decode_seconds(machine, [1000] * 8)
        assert whole == pytest.approx(8 * 2000 / attended_tokens_per_second(machine))

    def test_batching_pays(self) -> None:
        rates = [batch / batch_seconds(oracle(), batch) for batch in (1, 4, 16, 64)]
        assert rates == sorted(rates)

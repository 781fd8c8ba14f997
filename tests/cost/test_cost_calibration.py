"""Calibrations as files, and when they are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvell.cost.calibration import (
    decode_calibration,
    require_fresh,
)
from kvell.cost.model import prefill_seconds
from kvell.cost.parallel import Parallel
from kvell.errors import ChangeSomething
from tests.cost.made import MACHINE, MADE, MODEL, SOFTWARE
from tests.cost.oracles import decodes, oracle, prompt


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

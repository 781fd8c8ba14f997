"""Both servers get the same load and memory; refusals are reported."""

from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engine.pressure import peers
from bench.engine.pressure.cases import WANTED, pressed_bytes
from bench.engine.pressure.small import config_of
from bench.side_by_side.report import summary
from kvell.models.config.description import describe


def compared(shape: str, ours: float, theirs: float) -> dict[str, Any]:
    """The result of :func:`peers.measured` with these rates in every round."""
    [case] = peers.cases([shape])
    rounds = {
        name: [
            {"output_tokens_per_second": rate, "ttft_p50_seconds": 0.5, "tpot_p50_seconds": 0.01}
        ]
        * 3
        for name, rate in (("kvell", ours), ("vllm", theirs))
    }
    scenario = peers.Pressed(shape, case.requests, case=case)
    return {"shape": shape, **summary(scenario, rounds, None)}


def printed(found: list[dict[str, Any]]) -> str:
    console = Console(width=120, file=StringIO())
    with console.capture() as told:
        console.print(peers.table_of(found))
    return told.get()


def test_the_shapes_that_have_a_bound_are_asked_and_answer_at_length() -> None:
    assert [case.shape for case in peers.cases([])] == ["gemma3-27b", "falcon-h1-7b"]
    assert {case.output_tokens for case in peers.cases([])} == {peers.OUTPUT_TOKENS}


def test_a_round_has_the_lengths_of_its_case_and_another_round_others() -> None:
    [case] = peers.cases(["falcon-h1-7b"])
    asked = peers.Pressed("pressed", case.requests, case=case)
    rows = asked.rows(3)
    assert [row.prompt_tokens for row in rows] == case.prompts(3)
    assert {row.output_tokens for row in rows} == {case.output_tokens}
    assert case.prompts(3) != [row.prompt_tokens for row in asked.rows(4)] == case.prompts(4)
    assert not asked.is_rectangular
    assert asked.figure == "output_tokens_per_second"


def test_both_get_the_same_bytes_lengths_and_seats(monkeypatch: Any) -> None:
    started: dict[str, list[str]] = {}
    monkeypatch.setattr(peers, "kvell_server", lambda _m, _l, flags: started.update(kvell=flags))
    monkeypatch.setattr(peers, "vllm_server", lambda _p, _m, _l, flags: started.update(vllm=flags))
    [case] = peers.cases(["gemma3-27b"])
    for start in peers.starters(case, Path("model"), Path("python"), Path("logs")).values():
        start()
    kv_bytes = pressed_bytes(describe(config_of("gemma3-27b"), 2).layers, case)
    assert started["kvell"][-2:] == ["--kv-memory", f"{kv_bytes}B"]
    assert started["vllm"][-3:] == [
        "--kv-cache-memory-bytes",
        str(kv_bytes),
        "--no-enable-prefix-caching",
    ]
    assert started["kvell"][:-2] == started["vllm"][:-3]
    assert started["kvell"][:2] == ["--max-num-seqs", str(WANTED)]


def test_a_bound_is_kept_from_its_ratio_on() -> None:
    assert peers.is_kept(compared("falcon-h1-7b", 130.0, 100.0))
    assert not peers.is_kept(compared("falcon-h1-7b", 129.0, 100.0))
    assert peers.is_kept(compared("gemma3-27b", 100.0, 100.0))
    assert not peers.is_kept({"shape": "gemma3-27b", "refused": {"vllm": "no such kind"}})


def test_the_table_has_ratios_and_refusals() -> None:
    text = printed(
        [
            compared("gemma3-27b", 150.0, 100.0),
            {"shape": "falcon-h1-7b", "refused": {"vllm": "no such kind"}},
        ]
    )
    assert "1.50" in text
    assert "no such kind" in text

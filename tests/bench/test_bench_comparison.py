"""The comparison page: made from existing files, deterministic, with plots beside it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.comparison.__main__ import RESULTS, SECTIONS, sections_of, write
from bench.comparison.memory import managers, peers_in_one_run
from bench.comparison.page import page
from bench.comparison.section import Bars, Section
from bench.comparison.speed import load_tools, more_models, side_by_side


def system(median: float, ratio: float, share: float | None) -> dict[str, Any]:
    return {
        "median": {"output_tokens_per_second": median, "ttft_p50_seconds": 0.25},
        "rounds": [median],
        "spread": 0.1,
        "ratio": ratio,
        "share_of_limit": share,
        "decode_share_of_limit": share,
    }


SIDE_BY_SIDE = {
    "model": "smollm2",
    "rounds": 5,
    "machine": {"threads": 2},
    "roofline": {"read_bytes_per_second": 4e10, "gemm_flops_per_second": 9e11},
    "scenarios": [
        {
            "scenario": "batch 8",
            "figure": "output_tokens_per_second",
            "limit": 1000.0,
            "systems": {"kvell": system(500, 1.0, 0.5), "vllm": system(250, 2.0, 0.25)},
        },
        {
            "scenario": "sharegpt-like at 2/s",
            "figure": "output_tokens_per_second",
            "limit": None,
            "systems": {"kvell": system(80, 1.0, None)},
        },
    ],
}
VERDICT = {
    "tool": "kvell",
    "figure": "ttft_seconds",
    "against": "vllm",
    "found": 0.51,
    "reference": 0.5,
    "difference": 0.02,
    "allowed": 0.03,
    "agrees": True,
}


def test_side_by_side_names_systems_shares_and_what_was_not_asked() -> None:
    section = side_by_side(SIDE_BY_SIDE)
    assert section.rows[1] == (
        *("batch 8", "vLLM CPU 0.32", "250.0", "10%", "2.00×", "25%", "25%", "250.0", "–"),
    )
    assert section.rows[2][5] == "–", "a mix has no limit"
    [bars] = section.bars
    assert bars.series == {"Kvell": [500, 80], "vLLM CPU 0.32": [250, None]}
    assert "40.0 GB/s" in section.note


def test_further_models_have_rows_of_their_own_and_say_who_refused() -> None:
    refused = {"refused": {"vllm": "no such format"}}
    section = more_models({"models": [SIDE_BY_SIDE | {"model": "small"} | refused]})
    assert [row[:3] for row in section.rows] == [
        ("small, batch 8", "Kvell", "500.0"),
        ("small, batch 8", "vLLM CPU 0.32", "250.0"),
        ("small, sharegpt-like at 2/s", "Kvell", "80.0"),
    ]
    assert "vLLM CPU 0.32 has no row of small: no such format." in section.note
    assert all(len(row) == len(section.columns) for row in section.rows)


def test_tools_that_differ_are_marked() -> None:
    servers = {"fixed": {"rounds": 5, "verdicts": [VERDICT, VERDICT | {"agrees": False}]}}
    agreeing, differing = load_tools({"servers": servers}).rows
    assert agreeing == (
        "fixed, 5 runs",
        "kvell",
        "ttft",
        "vllm",
        "510.0",
        "500.0",
        "2.0%",
        "3.0%",
        "agrees",
    )
    assert differing[-1] == "**differs**"


def peer_run(us: float, batch: float) -> dict[str, float]:
    return {
        "manager_us_per_request_step": us,
        "batch_mean": batch,
        "hit_rate": 0.25,
        "waste": 0.01,
    }


PEERS = {
    "missed": [],
    "rows": [
        {
            "shape": "llama3-8b",
            "trace": "azure-2023-conv",
            "memory_gib": 16,
            "ours": [peer_run(2.0, 50), peer_run(1.0, 50)],
            "theirs": {"decodes-first": [peer_run(30.0, 40)]},
        }
    ],
}
MATRIX = {
    "cells": 10,
    "comparisons": 2,
    "verdicts": [
        {"clause": "no more steps", "compared": 2, "part": 0.5, "required": 1.0, "holds": False}
    ],
}


def test_peers_of_one_run_are_compared_by_the_best_times() -> None:
    section = peers_in_one_run(PEERS)
    [row] = section.rows
    assert row[0] == "llama3-8b, azure"
    assert row[2] == "50.0 / 40.0"
    assert row[-1] == "1.00 / 30.0"
    assert section.bars[0].series["Kvell"] == [1.25]


def test_clauses_that_do_not_hold_are_marked() -> None:
    [row] = managers(MATRIX).rows
    assert row == ("no more steps", "2", "50.0%", "100%", "**no**")


def test_a_page_names_its_sources_and_what_is_missing() -> None:
    bars = Bars("one", "a plot", "s", ["g"], {"x": [1.0]})
    section = Section("T", "a note", "a.json", "make a", ("k", "v"), [("a", "1")], [bars])
    text = page([section], ["b.json"])
    assert "| k | v |\n| :-- | --: |\n| a | 1 |" in text
    assert "![a plot](plots/one.svg)" in text
    assert "[`a.json`](a.json), `make a`" in text
    assert "Not measured yet: `b.json`." in text
    assert "Not measured" not in page([section], [])


def test_nothing_measured_is_a_page_too(tmp_path: Path) -> None:
    target = write(tmp_path)
    assert all(name in target.read_text() for name in SECTIONS)
    assert list((tmp_path / "plots").iterdir()) == []


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The committed files; small ones in place of the large."""
    for name in SECTIONS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS / name, tmp_path / name)
    (tmp_path / "zen5/side_by_side.json").write_text(json.dumps(SIDE_BY_SIDE))
    found = {"servers": {"fixed": {"rounds": 5, "verdicts": [VERDICT]}}}
    (tmp_path / "zen5/managers_peers.json").write_text(json.dumps(PEERS))
    (tmp_path / "virtual/managers.json").write_text(json.dumps(MATRIX))
    (tmp_path / "zen5/load_agreement.json").write_text(json.dumps(found))
    return tmp_path


def test_the_committed_figures_make_a_page_with_every_section(results: Path) -> None:
    sections, missing = sections_of(results)
    assert missing == []
    assert len(sections) == len(SECTIONS)
    text = write(results).read_text()
    for section in sections:
        assert all(len(row) == len(section.columns) for row in section.rows), section.title
        assert section.rows, section.title
        for bars in section.bars:
            assert f"(plots/{bars.name}.svg)" in text
            assert (results / "plots" / f"{bars.name}.svg").stat().st_size > 1000


def test_the_same_figures_make_the_same_bytes(results: Path) -> None:
    def written() -> dict[str, bytes]:
        write(results)
        return {file.name: file.read_bytes() for file in (results / "plots").iterdir()}

    first = written()
    (results / "plots" / "old.svg").write_text("of an earlier page")
    assert written() == first

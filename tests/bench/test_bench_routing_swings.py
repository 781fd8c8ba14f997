"""The benches of roles that follow a swinging load."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.routing import swings
from bench.routing.swings import Case, Half, means, swinging

SMALL = Case(1, 3, True, 3.0, 6.0, 6.0, 1)
HALVES = (Half(20.0, 1_000, 8), Half(40.0, 50, 200))


def test_halves_come_in_turn_with_their_rates_and_lengths() -> None:
    rows = swinging(HALVES * 2, 25.0, seed=3)
    times = np.array([row.arrival_s for row in rows])
    assert (np.diff(times) >= 0).all() and times[-1] < 100
    for number, half in enumerate(HALVES * 2):
        own = [row for row in rows if number * 25 <= row.arrival_s < (number + 1) * 25]
        assert len(own) == pytest.approx(25 * half.rate, rel=0.25)
        prompts = [row.prompt_tokens for row in own]
        answers = [row.output_tokens for row in own]
        assert np.mean(prompts) == pytest.approx(half.prompt_tokens, rel=0.1)
        assert np.mean(answers) == pytest.approx(half.answer_tokens, rel=0.1)
        assert half.prompt_tokens // 2 <= min(prompts)
        assert max(prompts) <= half.prompt_tokens * 3 // 2


def test_the_same_seed_gives_the_same_requests() -> None:
    first, again, other = (
        [(row.arrival_s, row.num_tokens) for row in swinging(HALVES, 5.0, seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_case_gives_every_figure() -> None:
    found = swings.run(SMALL)
    assert found["name"] == "1P2D, roles follow"
    assert 0 <= found["slo_attainment"] <= 1
    assert 0 < found["ttft_mean"] <= found["ttft_p99"]
    assert 0 < found["tpot_mean"] <= found["tpot_p99"]
    assert found["role_changes"] == 0, "little load asks for no change"
    assert swings.run(replace(SMALL, follows=False))["name"] == "1P2D"


def test_a_role_that_is_late_gets_an_instance() -> None:
    found = swings.run(replace(SMALL, prompt_rate=12.0, half_seconds=8.0))
    assert found["role_changes"] == 1
    fixed = swings.run(replace(SMALL, prompt_rate=12.0, half_seconds=8.0, follows=False))
    assert found["ttft_p99"] < fixed["ttft_p99"]


def test_means_are_over_seeds() -> None:
    figures = dict.fromkeys(swings.AVERAGED, 1.0)
    found = [
        {"name": "2P2D", **figures},
        {"name": "2P2D", **figures, "changes_per_swing": 3.0},
        {"name": "3P1D", **figures, "slo_attainment": 0.5},
    ]
    first, second = means(found)
    assert (first["name"], first["changes_per_swing"]) == ("2P2D", 2.0)
    assert (second["name"], second["slo_attainment"]) == ("3P1D", 0.5)


def test_virtual_figures_are_written_for_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "roles.json"
    flags = ["--instances", "2", "--half-seconds", "1", "--swings", "1", "--seeds", "0", "1"]
    swings.main([*flags, "--json", str(file)])
    runs = json.loads(file.read_text())["runs"]
    assert [(one["name"], one["case"]["seed"]) for one in runs] == [
        ("1P1D", 0),
        ("1P1D", 1),
        ("1P1D, roles follow", 0),
        ("1P1D, roles follow", 1),
    ]
    assert "1P1D, roles follow" in capsys.readouterr().out

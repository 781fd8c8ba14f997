"""The benches of roles that follow a swinging load."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.routing import roles_served, swings
from bench.routing.roles_served import (
    KeptPrompts,
    RoleWatch,
    Served,
    Setting,
    changes_of,
    wrong_answers,
)
from bench.routing.swings import Case, Half, means, swinging
from kvell.load.prompts import Answer
from kvell.simulator.traces.rows import TraceRow

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


def test_changes_are_told_from_looks() -> None:
    start = {"prefill-0": "prefill", "decode-0": "decode"}
    seen = [
        (0.0, start),
        (2.5, start | {"decode-0": "prefill"}),
        (9.0, {"prefill-0": "decode", "decode-0": "decode"}),
    ]
    assert changes_of(seen) == [
        (2.5, "decode-0", "prefill"),
        (9.0, "prefill-0", "decode"),
        (9.0, "decode-0", "decode"),
    ]
    assert changes_of(seen[:1]) == changes_of([]) == []


def test_wrong_answers_are_counted() -> None:
    rows = [TraceRow(0.0, 5, 2), TraceRow(1.0, 5, 2), TraceRow(2.0, 5, 3)]
    reference = {0: [7, 8], 1: [7, 8], 2: [1, 2, 3]}
    assert wrong_answers(reference, reference, rows) == {"other_tokens": 0, "other_length": 0}
    wrong = {0: [7, 9], 1: [7, 8], 2: [1, 2]}
    assert wrong_answers(wrong, reference, rows) == {"other_tokens": 2, "other_length": 1}


def test_answers_are_kept() -> None:
    prompts = KeptPrompts([TraceRow(0.0, 5, 2)], seed=0)
    asked = prompts.ask(0)["prompt"]
    assert len(asked) == 5 and max(asked) < roles_served.VOCABULARY
    prompts.answered(0, Answer("ab", [7, 8]))
    assert prompts.answers == {0: [7, 8]}


class ScriptedCluster:
    """Answers ``/cluster`` with one set of roles after another."""

    def __init__(self, looks: Sequence[str]) -> None:
        self._looks = list(looks)

    async def get(self, path: str) -> tuple[int, bytes]:
        assert path == "/cluster"
        if not self._looks:
            raise EOFError
        role = self._looks.pop(0)
        return 200, json.dumps({"instances": [{"id": "decode-0", "serves_as": role}]}).encode()


def test_looks_with_the_same_roles_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles_served, "LOOK_SECONDS", 0.0)
    roles = ["decode", "decode", "prefill", "prefill", "decode"]
    watch = RoleWatch(ScriptedCluster(roles))  # type: ignore[arg-type]
    with pytest.raises(EOFError):
        asyncio.run(watch.look_on())
    assert [one["decode-0"] for _, one in watch.seen] == ["decode", "prefill", "decode"]
    assert len(changes_of(watch.seen)) == 2


def test_servers_take_turns_with_the_same_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, int]] = []

    def pretend(
        way: str, setting: Setting, rows: Sequence[TraceRow], seed: int, _folder: Path
    ) -> Served:
        assert setting.instances == "prefill=1,decode=2"
        asked.append((way, seed, len(rows)))
        spread = {"mean": 1.0, "p99": 2.0}
        figures: dict[str, Any] = {"completed": len(rows), "failed": 0, "slo_attainment": 0.5}
        figures |= {"ttft_seconds": spread, "tpot_seconds": spread}
        answers = {index: [0] * row.output_tokens for index, row in enumerate(rows)}
        follows = way == "roles follow"
        if follows:
            answers[0] = [1] * rows[0].output_tokens
        return Served(figures, answers, [(3.0, "decode-0", "prefill")] * 3 * follows)

    monkeypatch.setattr(roles_served, "served", pretend)
    file = tmp_path / "served.json"
    roles_served.main(["--rounds", "2", "--swings", "2", "--json", str(file)])
    ways = [way for way, _, _ in asked]
    assert ways == ["roles stay", "roles follow", "roles follow", "roles stay"]
    assert asked[0][1:] == asked[1][1:] and asked[2][1:] == asked[3][1:]
    runs = json.loads(file.read_text())["runs"]
    found = [(one["way"], one["changes_per_swing"], one["other_tokens"]) for one in runs]
    assert found[:2] == [("roles stay", 0.0, 0), ("roles follow", 1.5, 1)]
    assert sorted(found[2:]) == sorted(found[:2])
    assert "changes_per_swing" in capsys.readouterr().out

"""What another manager's better cell is worth, once its neighbours are asked."""

import gzip
import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.managers.luck import Case, Figures, Pair, finding, replay_pair, rivals, table
from tests.managers.outcomes import PLACE, compared, ran

CASE = Case(PLACE, "paged")


def pairs(*hits: tuple[float, float], steps: tuple[int, int] = (100, 100)) -> list[Pair]:
    return [(Figures(steps[0], own), Figures(steps[1], rival)) for own, rival in hits]


class TestRivals:
    def test_nobody_is_one_within_the_slack(self) -> None:
        near = ran(100, hit_rate=0.104)
        assert not list(rivals(compared(paged=near, jenga=ran(100))))

    def test_the_best_in_hits_and_the_best_in_steps_are(self) -> None:
        found = rivals(
            compared(
                paged=ran(120, hit_rate=0.2),
                static=ran(120, hit_rate=0.19),
                jenga=ran(90),
                max_page=ran(95),
            )
        )
        assert list(found) == ["paged", "jenga"]

    def test_who_is_best_in_both_is_one_rival(self) -> None:
        assert list(rivals(compared(static=ran(90, hit_rate=0.2)))) == ["static"]

    def test_vllm_is_none_since_its_cells_take_minutes(self) -> None:
        best = ran(100, hit_rate=0.3)
        assert list(rivals(compared(vllm=best, paged=ran(100, hit_rate=0.2)))) == ["paged"]


class TestFinding:
    def test_means_of_pairs(self) -> None:
        found = finding(CASE, 0.1, pairs((0.1, 0.2), (0.2, 0.2), (0.3, 0.5), steps=(90, 100)))
        assert found.behind == pytest.approx(0.1)
        assert found.error == pytest.approx(0.1 / 3**0.5)
        assert (found.own_hits, found.own_spread) == pytest.approx((0.2, 0.2))
        assert found.own_steps == 90
        assert (found.steps, found.sizes, found.matrix_behind) == (0.9, 3, 0.1)

    @pytest.mark.parametrize(
        ("hits", "steps", "told"),
        [
            (((0.10, 0.30), (0.30, 0.10)), (100, 100), "luck"),
            (((0.10, 0.20), (0.10, 0.21)), (100, 100), "behind"),
            (((0.10, 0.40), (0.30, 0.31)), (100, 100), "not told apart"),
            (((0.10, 0.20), (0.10, 0.21)), (80, 100), "runs fewer at once"),
            (((0.10, 0.20), (0.10, 0.21)), (102, 100), "later"),
            (((0.30, 0.10), (0.30, 0.10)), (102, 100), "later"),
            (((0.30, 0.10), (0.30, 0.10)), (80, 100), "luck"),
        ],
    )
    def test_in_words(
        self, hits: tuple[tuple[float, float], ...], steps: tuple[int, int], told: str
    ) -> None:
        assert finding(CASE, 0.1, pairs(*hits, steps=steps)).told == told

    def test_a_row_says_it_all(self) -> None:
        console = Console(file=io.StringIO(), width=160)
        console.print(table([finding(CASE, 0.05, pairs((0.1, 0.2), (0.1, 0.21)))]))
        assert isinstance(console.file, io.StringIO)
        row = console.file.getvalue()
        for cell in (".".join(map(str, PLACE)), "paged", "0.0500", "0.1050", "behind"):
            assert cell in row


def test_both_replay_the_same_rows_in_the_same_memory(tmp_path: Path) -> None:
    trace = tmp_path / "coding-assistant.jsonl.gz"
    lines = [
        f'{{"arrival_s": {at}, "prompt_tokens": 900, "output_tokens": 5,'
        f' "block_hashes": [{at % 2}], "block_tokens": 512}}'
        for at in range(4)
    ]
    trace.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = replay_pair(tmp_path, (Case(("llama3-8b", "coding-assistant", 8), "paged"), 1.0))
    assert found is not None
    own, rival = found
    assert own == rival  # full attention only: the decisions of paged
    assert own.steps > 4
    assert 0 < own.hit_rate < 1

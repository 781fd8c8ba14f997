"""Which cells there are, how much memory each has, and what runs in one."""

from pathlib import Path

import pytest

from bench.managers.bound import bound
from bench.managers.cells import (
    IDEAL,
    OURS,
    SHAPES,
    SIZES,
    TRACES,
    VLLM,
    WITHOUT_REUSE,
    Cell,
    cells,
    kinds,
    memory_bytes,
)
from bench.managers.ours import digest, outcome, replayed
from bench.managers.theirs import PEER_SHAPES
from bench.managers.verdicts import comparisons, verdicts
from bench.replay.shapes import read_shape
from kvell.memory import longest_request, plan_layout
from kvell.simulator.replay.replay import RequestFigures
from tests.simulator.replays import MACHINE, row

CELL = Cell("gpt-oss-20b", "azure-2023-code", 8, "kvell")


class TestCells:
    def test_every_shape_trace_and_size_under_every_manager_of_ours(self) -> None:
        ours = list(cells(managers=OURS))
        assert len(ours) == len(SHAPES) * len(TRACES) * len(SIZES) * len(OURS) == 1500

    def test_vllm_on_the_peers_shapes_in_both_settings(self) -> None:
        theirs = list(cells(managers=tuple(VLLM)))
        assert len(theirs) == len(PEER_SHAPES) * len(TRACES) * len(SIZES) * 2
        assert {cell.shape for cell in theirs} == set(PEER_SHAPES)

    def test_a_bound_where_nothing_is_shared(self) -> None:
        bounds = list(cells(managers=[IDEAL]))
        assert {cell.trace for cell in bounds} == set(WITHOUT_REUSE)
        assert len(bounds) == len(SHAPES) * len(SIZES) * 2

    def test_a_comparison_is_finished_before_the_next_begins(self) -> None:
        places = [cell.place for cell in cells()]
        assert len(set(places)) == sum(
            before != after for before, after in zip([None, *places], places, strict=False)
        )

    def test_filters(self) -> None:
        found = list(cells(["llama3-8b"], ["azure-2023-conv"], [16], ["kvell", "vllm"]))
        assert [cell.manager for cell in found] == ["kvell", "vllm"]
        assert {cell.place for cell in found} == {("llama3-8b", "azure-2023-conv", 16)}

    def test_every_config_but_the_drafts_is_a_shape(self) -> None:
        configs = Path(__file__).parents[2] / "bench" / "configs"
        assert sorted(path.stem for path in configs.glob("*.json")) == sorted(SHAPES)

    def test_a_name_says_all(self) -> None:
        assert CELL.name == "gpt-oss-20b.azure-2023-code.8.kvell"


class TestMemory:
    def test_mean_requests_in_whole_pages_of_paged(self) -> None:
        shape = read_shape("gpt-oss-20b")
        page_bytes = 24 * 2 * 8 * 64 * 2 * 16
        rows = [row(16, 1), row(31, 1), row(32, 1)]  # 2, 2 and 3 pages
        assert memory_bytes(shape, rows, 6) == 14 * page_bytes

    def test_room_for_the_longest_at_least(self) -> None:
        shape = read_shape("gemma3-27b")
        rows = [row(10, 1) for _ in range(99)] + [row(5000, 1)]
        layout = plan_layout(
            shape.description.layers, memory_bytes(shape, rows, 8), manager="paged"
        )
        assert longest_request(layout, 1 << 20, 64) >= 5001

    def test_states_count_as_paged_stores_them(self) -> None:
        shape = read_shape("nemotron-h-8b")
        layout = plan_layout(shape.description.layers, 64 << 30, manager="paged")
        assert memory_bytes(shape, [row(10, 1)], 8) >= 8 * 25 * min(
            group.page_stride_bytes // max(1, group.slices) for group in layout.groups
        )

    @pytest.mark.parametrize("name", SHAPES)
    def test_kinds_without_images(self, name: str) -> None:
        assert "vision" not in kinds(read_shape(name))
        assert kinds(read_shape(name)) == sorted(set(kinds(read_shape(name))))

    def test_which_shapes_are_full_attention_only(self) -> None:
        plain = [name for name in SHAPES if kinds(read_shape(name)) == ["full"]]
        images = ["llava-onevision-7b", "qwen2.5-vl-7b"]
        assert plain == ["deepseek-v2-lite", "llama3-8b", *images, "qwen3-8b"]


def steps_of(one: RequestFigures) -> tuple[int | None, ...]:
    return one.hit_tokens, one.admitted_step, one.first_token_step, one.finish_step


class TestOurs:
    ROWS = tuple(row(40 + 7 * i, 5) for i in range(12))

    def test_a_cell_runs_to_its_end(self) -> None:
        shape = read_shape("gpt-oss-20b")
        memory = memory_bytes(shape, self.ROWS, 8)
        found = {name: outcome(shape, self.ROWS, memory, name) for name in ("kvell", "paged")}
        assert {one["requests_finished"] for one in found.values()} == {12}
        assert found["paged"]["short_of_memory"] > 0
        assert found["kvell"]["steps"] <= found["paged"]["steps"]

    @pytest.mark.parametrize("name", ["gemma3-27b", "nemotron-h-8b", "llama3-8b"])
    def test_nobody_is_faster_than_a_packer_without_pages(self, name: str) -> None:
        shape = read_shape(name)
        memory = memory_bytes(shape, self.ROWS, 8)
        ideal = bound(shape, self.ROWS, memory)
        assert ideal["requests_finished"] == len(self.ROWS)
        assert ideal["steps"] <= outcome(shape, self.ROWS, memory, "kvell")["steps"]

    @pytest.mark.parametrize("name", SHAPES)
    def test_every_shape_runs_under_every_manager(self, name: str) -> None:
        shape = read_shape(name)
        memory = memory_bytes(shape, self.ROWS, 8)
        found = {manager: outcome(shape, self.ROWS, memory, manager) for manager in OURS}
        (compared,) = comparisons(
            {Cell(name, "azure-2023-code", 8, manager): one for manager, one in found.items()},
            {name: kinds(shape)},
        )
        told = verdicts([compared])
        assert not any(one.missed for one in (told[0], told[1], told[-1]))
        assert found["kvell"]["requests_finished"] == len(self.ROWS)

    def test_a_request_longer_than_the_model_was_made_for_is_served(self) -> None:
        shape = read_shape("gpt-oss-20b")
        rows = [row(shape.description.max_model_len, 2), row(40, 2)]
        found = outcome(shape, rows, memory_bytes(shape, rows, 8), "kvell")
        assert (found["requests_finished"], found["requests_refused"]) == (2, 0)

    def test_how_long_steps_take_decides_nothing(self) -> None:
        shape = read_shape("gpt-oss-20b")
        memory = memory_bytes(shape, self.ROWS, 8)
        timed = replayed(shape, self.ROWS, memory, "kvell", machine=MACHINE)
        equal = replayed(shape, self.ROWS, memory, "kvell")
        assert timed.clock.now_seconds() != equal.clock.now_seconds()
        assert [steps_of(one) for one in timed.requests] == [
            steps_of(one) for one in equal.requests
        ]

    def test_too_little_memory_is_refused_with_a_reason(self) -> None:
        found = outcome(read_shape("llama3-8b"), self.ROWS, 1 << 16, "kvell")
        assert "--kv-memory" in found["refused"]

    def test_a_digest_tells_steps_apart(self) -> None:
        early, late = RequestFigures(0, 8, finish_step=3), RequestFigures(0, 8, finish_step=4)
        assert digest([early]) == digest([RequestFigures(0, 8, finish_step=3)])
        assert digest([early]) != digest([late])

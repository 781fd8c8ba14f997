"""Virtual time: events in order, and steps that take as long as their work."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvell.cost.analytic import (
    AnalyticModel,
    DeviceProfile,
    LayerCost,
    LinkProfile,
    ModelCost,
    StepCost,
)
from kvell.cost.model import prefill_seconds
from kvell.engine.requests.plan import TokenWork
from kvell.errors import ChangeSomething
from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import describe
from kvell.prefix.groups.policies import GroupPolicy, SlidingPolicy
from kvell.simulator.clock.events import EventQueue
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import (
    HARDWARE_DIR,
    LINKS_DIR,
    hardware_names,
    load_link,
    load_profile,
)
from tests.engine.works import work_of

SLOW = DeviceProfile("slow", 100.0, 0.5, 10.0, 0.5, 1.0)


class TestEvents:
    def test_by_time_then_by_scheduling(self) -> None:
        queue: EventQueue[str] = EventQueue()
        for at, name in [(2.0, "late"), (1.0, "first"), (1.0, "second"), (0.5, "early")]:
            queue.schedule(at, name)
        assert queue.next_seconds() == 0.5
        assert [queue.pop() for _ in range(4)] == ["early", "first", "second", "late"]

    def test_empty(self) -> None:
        queue: EventQueue[str] = EventQueue()
        assert queue.next_seconds() is None
        with pytest.raises(IndexError):
            queue.pop()

    @pytest.mark.parametrize(("now", "due"), [(0.9, 0), (1.0, 2), (2.9, 3), (3.0, 4), (9.0, 4)])
    def test_due(self, now: float, due: int) -> None:
        queue: EventQueue[str] = EventQueue()
        assert queue.num_due(now) == 0
        for at in (3.0, 1.0, 2.0, 1.0):
            queue.schedule(at, "event")
        assert queue.num_due(now) == due
        queue.pop()
        assert queue.num_due(now) == max(0, due - 1)

    def test_items_need_no_order(self) -> None:
        queue: EventQueue[dict[str, int]] = EventQueue()
        queue.schedule(1.0, {"a": 1})
        queue.schedule(1.0, {"a": 0})
        assert queue.pop() == {"a": 1}


class TestProfiles:
    def test_the_slower_part_decides(self) -> None:
        assert SLOW.step_seconds(StepCost(100.0, 5.0)) == 1.0 + 2.0
        assert SLOW.step_seconds(StepCost(100.0, 20.0)) == 1.0 + 4.0

    def test_monotone(self) -> None:
        profile = load_profile("a100-80")
        flops = [profile.step_seconds(StepCost(x, 1e10)) for x in np.geomspace(1e9, 1e16, 30)]
        reads = [profile.step_seconds(StepCost(1e12, x)) for x in np.geomspace(1e6, 1e13, 30)]
        for seconds in (flops, reads):
            assert all(a <= b for a, b in pairwise(seconds))
            assert seconds[-1] > 10 * seconds[0]

    def test_packaged_profiles_load_and_name_their_source(self) -> None:
        names = hardware_names()
        assert {"a100-80", "h100", "h200", "h800", "l4", "l40s"} <= set(names)
        cost = StepCost(1e13, 1e10)
        seconds = {name: load_profile(name).step_seconds(cost) for name in names}
        assert seconds["l4"] > seconds["a100-80"] > seconds["h100"]

    def test_own_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text(
            "peak_flops=1e3\nflops_efficiency=1\nbandwidth_bytes=2\n"
            "bandwidth_efficiency=1\nstep_overhead_seconds=0.5\n"
        )
        assert load_profile(str(path)) == DeviceProfile("mine", 1e3, 1.0, 2.0, 1.0, 0.5)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [("peak_flops = 0", "peak_flops is 0"), ("= 3", "not TOML"), ("", "peak_flops is None")],
    )
    def test_broken_file(self, tmp_path: Path, text: str, problem: str) -> None:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(ChangeSomething, match=problem):
            load_profile(str(path))

    def test_unknown_name(self) -> None:
        with pytest.raises(ChangeSomething, match="a100-80"):
            load_profile("abacus")


class TestLinks:
    def test_packaged_links_name_their_source(self) -> None:
        names = hardware_names(LINKS_DIR)
        assert {"nvlink-a100", "nvlink-h100", "nvlink-h800", "pcie-4", "pcie-5"} <= set(names)
        speeds = {name: load_link(name).bytes_per_second for name in names}
        assert speeds["nvlink-h100"] > speeds["nvlink-h800"] > speeds["pcie-5"]
        assert speeds["pcie-4"] > speeds["ethernet-100g"] > speeds["ethernet-25g"]
        files = [*HARDWARE_DIR.glob("*.toml"), *HARDWARE_DIR.glob("links/*.toml")]
        assert all("# Source: " in path.read_text() for path in files)

    def test_messages_reach_a_part_of_the_bandwidth(self) -> None:
        assert LinkProfile("slow", 100.0, 0.5, 2.0).bytes_per_second == 50.0

    def test_devices_that_speak_over_it(self) -> None:
        link = LinkProfile("slow", 100.0, 0.5, 2.0)
        pair = link.parallel(10, 4, tensor=2)
        assert pair.message_seconds(3) == pytest.approx(2 * 10 * (2.0 + 3 * 4 / 50.0))

    def test_unknown(self) -> None:
        with pytest.raises(ChangeSomething, match=r"--link.*nvlink-h100"):
            load_link("string")


class TestAnalyticModel:
    def test_answers_what_schedulers_ask(self) -> None:
        model = AnalyticModel(SLOW, ModelCost(1, 2, 1, (LayerCost(GroupPolicy(), 1, 1),)))
        assert model.step_seconds([work(0, 2)]) == SLOW.step_seconds(
            model.cost.of_step([work(0, 2)])
        )
        halves = [prefill_seconds(model, 1000, ratio) for ratio in (0.0, 0.5, 0.9)]
        assert halves == sorted(halves, reverse=True)


def work(start: int, count: int) -> TokenWork:
    return work_of("0", 1, start, count)


class TestModelCost:
    def test_of_a_step(self) -> None:
        # Full: 64 B a token; sliding(5): 32 B a token, at most 4 of them live.
        layers = (LayerCost(GroupPolicy(), 1, 64), LayerCost(SlidingPolicy(5), 1, 32))
        cost = ModelCost(active_weights=10, weight_bytes=1_000, query_size=3, layers=layers)
        step = cost.of_step([work(9, 1), work(0, 2)])
        assert step.read_bytes == 1_000 + 64 * (10 + 2) + 32 * (4 + 2)
        # A token attends to what is live at the middle of its work, and to itself.
        assert step.flops == 2 * 10 * 3 + 4 * 3 * ((10 + 2 * 2) + (5 + 2 * 2))

    def test_published_weights(self) -> None:
        raw = {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
        config = config_from_dict(raw)
        cost = model_cost(config, describe(config, 2), 2)
        assert abs(cost.active_weights - 7.5e9) < 0.1e9  # 8.03e9 without the input embedding
        assert cost.weight_bytes == 2 * cost.active_weights

    def test_experts_are_all_read_but_few_computed(self) -> None:
        raw = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
        config = config_from_dict(raw)
        cost = model_cost(config, describe(config, 2), 2)
        assert abs(cost.active_weights - 12.8e9) < 0.3e9
        assert abs(cost.weight_bytes / 2 - 46.6e9) < 0.5e9

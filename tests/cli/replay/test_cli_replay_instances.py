"""``kvell replay --instances``: several instances behind a front."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvell.cli.replay.instances import LINKS, Together, hardware_prices
from kvell.cost.analytic import AnalyticModel
from kvell.cost.model import prefill_seconds
from kvell.cost.prices import FIT_TOKENS, USUAL_PRICES, ExecCosts
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.front.request_queue import RequestQueue
from kvell.memory import GroupKind, LayerSpec, plan_layout
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec
from kvell.simulator.cluster.network import Links
from kvell.simulator.hardware.profiles import hardware_names, link_names
from kvell.simulator.replay.runner import CalibratedMachine, Machine
from tests.cost.test_cost_calibration import MADE
from tests.simulator.replays import MACHINE

Kvell = Callable[..., Any]
MODEL = AnalyticModel(MACHINE.profile, MACHINE.cost)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    shared = {"block_hashes": [5, 6], "block_tokens": 64}
    lines = [
        {"arrival_s": 0.5 * i, "prompt_tokens": 200 + i, "output_tokens": 6} | shared
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def asked(kvell: Kvell, tiny_config: Path, trace: Path) -> Callable[..., Any]:
    """A replay of the small trace that has ended."""

    def call(*flags: str | Path) -> Any:
        args = ("--trace", trace, "--model", tiny_config, "--kv-memory", "16MiB", *flags)
        return kvell("replay", *args)

    return call


@pytest.fixture
def replay(asked: Callable[..., Any]) -> Callable[..., Any]:
    """The figures of a replay of the small trace."""

    def call(*flags: str | Path) -> Any:
        ended = asked("--json", "--arrivals", "trace", *flags)
        assert ended.code == 0, ended.stderr
        return json.loads(ended.stdout)

    return call


class TestFigures:
    def test_each_role_has_its_own(self, replay: Any) -> None:
        found = replay("--instances", "prefill=1,decode=2")
        assert found["instances"] == {"prefill": 1, "decode": 2}
        assert (found["requests_finished"], found["requests_moved"]) == (8, 8)
        roles = found["roles"]
        assert roles["prefill"]["hit_rate"] > 0.5
        assert roles["decode"]["computed_tokens"] == 8 * 5
        assert 0 < found["moved_bytes"] == sum(one["pulled_bytes"] for one in roles.values())
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
            assert 0 < found[name]["p50"] <= found[name]["p99"]

    def test_mixed_instances_move_nothing(self, replay: Any) -> None:
        found = replay("--instances", "mixed=3", "--routing", "round-robin")
        assert (found["requests_finished"], found["requests_moved"]) == (8, 0)
        assert found["moved_bytes"] == 0

    def test_less_is_cached_if_that_is_asked(self, replay: Any, trace: Path) -> None:
        """Where the other instance caches too, only what is new of a next turn crosses."""
        first = {"arrival_s": 0.0, "prompt_tokens": 200, "output_tokens": 6, "session": "s"}
        then = first | {"arrival_s": 9.0, "prompt_tokens": 250, "continues": True}
        trace.write_text("".join(json.dumps(line) + "\n" for line in (first, then)))
        by_caching = [
            replay("--instances", "prefill=1,decode=1", "--pd-caching", str(caching))
            for caching in range(4)
        ]
        hits = [one["roles"]["prefill"]["hit_rate"] for one in by_caching]
        there = [one["roles"]["decode"]["arriving_hit_rate"] for one in by_caching]
        assert hits[0] == 0 < hits[1] == hits[2] < hits[3]
        assert there[0] == there[1] == 0 < there[2]
        assert by_caching[2]["moved_bytes"] < by_caching[1]["moved_bytes"]

    def test_a_slower_link_makes_answers_late_and_not_their_first_tokens(self, replay: Any) -> None:
        pair = ("--instances", "prefill=1,decode=1")
        fast, slow = replay(*pair), replay(*pair, "--link-bandwidth", "10MB")
        assert slow["link_bytes_per_second"] == 10e6 < fast["link_bytes_per_second"]
        assert slow["ttft_seconds"] == fast["ttft_seconds"]
        assert slow["e2e_seconds"]["mean"] > fast["e2e_seconds"]["mean"]

    def test_a_rate_stands_for_arrivals(self, asked: Any) -> None:
        ended = asked("--json", "--instances", "mixed=2", "--rate", "4")
        assert ended.code == 0, ended.stderr
        assert json.loads(ended.stdout)["requests_finished"] == 8

    def test_each_request_can_be_kept(self, replay: Any, tmp_path: Path) -> None:
        path = tmp_path / "requests.jsonl"
        replay("--instances", "prefill=1,decode=1", "--requests-out", path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["index"] for line in lines] == list(range(8))
        assert all(line["first_token_seconds"] < line["finish_seconds"] for line in lines)

    def test_tables_for_people(self, asked: Any) -> None:
        ended = asked("--instances", "prefill=1,decode=1", "--arrivals", "trace")
        assert ended.code == 0, ended.stderr
        for word in ("prefill", "decode", "pulled bytes", "to the first token", "requests moved"):
            assert word in ended.stdout
        for name in ("lent", "borrowed", "returned", "lost", "recalled"):
            assert f"sections {name}" in ended.stdout


class TestRefusals:
    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            (("--instances", "prefill=1"), "--instances"),
            (("--instances", "both=2"), "--instances"),
            (("--instances", "mixed=2"), "--arrivals"),
            (("--pd-caching", "1"), "--instances"),
            (("--link", "nvlink-a100"), "--instances"),
            (("--link-bandwidth", "1GB"), "--instances"),
            (("--instances", "mixed=2", "--rate", "1", "--pd-caching", "1"), "--pd-caching"),
            (("--instances", "mixed=2", "--rate", "1", "--link", "rope"), "--link"),
            (
                ("--instances", "mixed=2", "--rate", "1", "--num-speculative-tokens", "2"),
                "--num-speculative-tokens",
            ),
            (("--instances", "mixed=2", "--rate", "1", "--timeline", "t.jsonl"), "--timeline"),
        ],
    )
    def test_the_flag_is_named(self, asked: Any, flags: tuple[str, ...], told: str) -> None:
        ended = asked(*flags)
        assert ended.code == 2 and told in ended.stderr

    def test_images_are_not_replayed(self, asked: Any, trace: Path) -> None:
        images = [{"start": 0, "tokens": 10, "id": 1}]
        line = {"arrival_s": 9.0, "prompt_tokens": 20, "output_tokens": 3, "images": images}
        trace.write_text(trace.read_text() + json.dumps(line) + "\n")
        ended = asked("--instances", "mixed=2", "--arrivals", "trace")
        assert ended.code == 2 and "images" in ended.stderr


class TestLinks:
    def test_every_profile_has_a_link_of_its_own(self) -> None:
        kinds = {name.partition("-")[0] for name in hardware_names()}
        assert kinds == set(LINKS)
        assert set(LINKS.values()) <= set(link_names())

    def test_of_a_profile_by_its_name(self) -> None:
        assert Together().pages_link("a100-80", MACHINE).bandwidth_bytes == 240e9

    def test_a_bandwidth_replaces_the_links(self) -> None:
        link = Together(link="pcie-4", link_bandwidth=10**9).pages_link("a100-80", MACHINE)
        assert (link.bandwidth_bytes, link.latency_seconds) == (1e9, 1.5e-5)

    def test_own_hardware_needs_one(self) -> None:
        with pytest.raises(ChangeSomething, match="--link nvlink-h100"):
            Together().pages_link("mine.toml", MACHINE)
        assert Together(link_bandwidth=5).pages_link("mine.toml", MACHINE).bandwidth_bytes == 5
        assert isinstance(MACHINE, Machine)


class TestPrices:
    def test_they_are_those_of_the_model_on_the_hardware(self) -> None:
        layers = [LayerSpec(0, GroupKind.FULL, 2, 8, 2, 0)]
        layout = plan_layout(layers, 1 << 20)
        for machine in (MACHINE, CalibratedMachine(MADE)):
            links = Links(Link(0.0, 1e9))
            spec = ClusterSpec({"mixed": 2}, layout, Limits(512, 8, 4096), machine, links)
            costs = hardware_prices(spec, layers)
            assert costs.fetch_token_seconds == pytest.approx(2 * 2 * 8 * 2 / 1e9)
            assert costs.chunk_tokens == 512
            model = MADE if isinstance(machine, CalibratedMachine) else MODEL
            seconds = prefill_seconds(model, FIT_TOKENS[-1], 0.0, chunk_tokens=512)
            assert costs.exec_seconds(FIT_TOKENS[-1], 0) == pytest.approx(seconds, rel=0.02)

    def test_instances_report_them(self, replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[ExecCosts] = []
        monkeypatch.setattr(RequestQueue, "open", _noting(opened, RequestQueue.open))
        replay("--instances", "mixed=2", "--hardware", "h100")
        assert len({costs.token_seconds for costs in opened}) == 1
        assert opened[0].token_seconds < USUAL_PRICES.token_seconds / 100


def _noting(opened: list[ExecCosts], call: Any) -> Any:
    def open_line(queue: RequestQueue, name: str, facts: InstanceFacts, **how: Any) -> Any:
        opened.append(facts.prices)
        return call(queue, name, facts, **how)

    return open_line


class TestHosts:
    def test_instances_share_a_host_where_pools_are_in_its_memory(self) -> None:
        assert MADE.machine.device == "cpu"
        assert Together().hosts(CalibratedMachine(MADE)) == {}
        on_gpu = replace(MADE, machine=replace(MADE.machine, device="cuda"))
        assert Together().hosts(CalibratedMachine(on_gpu)) is None
        assert Together().hosts(MACHINE) is None

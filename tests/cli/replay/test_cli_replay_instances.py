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
from kvell.errors import ChangeSomething
from kvell.front.request_queue import RequestQueue
from kvell.memory import GroupKind, LayerSpec
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.instance import Links
from kvell.simulator.hardware.profiles import LINKS_DIR, hardware_names
from kvell.simulator.replay.runner import CalibratedMachine, Machine
from kvell.simulator.report.timeline import read_timeline
from tests.cost.made import MADE
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
            (("--pd-caching", "1"), "--instances"),
            (("--link", "nvlink-a100"), "--instances"),
            (("--link-bandwidth", "1GB"), "--instances"),
            (("--instances", "mixed=2", "--rate", "1", "--pd-caching", "1"), "--pd-caching"),
            (("--instances", "mixed=2", "--rate", "1", "--link", "rope"), "--link"),
        ],
    )
    def test_the_flag_is_named(self, asked: Any, flags: tuple[str, ...], told: str) -> None:
        ended = asked(*flags)
        assert ended.code == 2 and told in ended.stderr


class TestParts:
    """What the replay of one instance has, that of several has too."""

    def test_images(self, replay: Any, trace: Path, tmp_path: Path) -> None:
        images = [{"start": 0, "tokens": 10, "id": 1}]
        line = {"arrival_s": 9.0, "prompt_tokens": 20, "output_tokens": 3, "images": images}
        trace.write_text(trace.read_text() + json.dumps(line) + "\n")
        path = tmp_path / "requests.jsonl"
        replay("--instances", "prefill=1,decode=1", "--requests-out", path)
        last = json.loads(path.read_text().splitlines()[-1])
        assert last["prompt_tokens"] == 30 and last["finish_seconds"] > 9.0

    def test_arrivals_at_the_start(self, asked: Any) -> None:
        ended = asked("--json", "--instances", "mixed=2")
        assert ended.code == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert found["requests_finished"] == 8
        assert found["roles"]["mixed"]["batch_mean"] > 1

    def test_draft_tokens_save_steps(self, replay: Any) -> None:
        flags = ("--instances", "mixed=2", "--routing", "round-robin", "--acceptance", "1")
        plain, drafting = replay(*flags), replay(*flags, "--num-speculative-tokens", "2")
        assert drafting["requests_finished"] == 8
        assert drafting["roles"]["mixed"]["steps"] < plain["roles"]["mixed"]["steps"]

    def test_requests_move_with_draft_tokens(self, replay: Any) -> None:
        found = replay("--instances", "prefill=1,decode=1", "--num-speculative-tokens", "2")
        assert found["requests_finished"] == found["requests_moved"] == 8

    def test_a_timeline_shows_all_instances_as_one(self, replay: Any, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        found = replay("--instances", "mixed=2", "--timeline", path)
        moments = read_timeline(path)
        assert len(moments) == found["roles"]["mixed"]["steps"]
        assert {moment.pool_bytes for moment in moments} == {2 * found["kv_memory_bytes"]}
        assert all(moment.evictable_bytes >= 0 for moment in moments)

    def test_one_instance_behind_a_front_does_what_one_alone_does(self, replay: Any) -> None:
        alone, found = replay(), replay("--instances", "mixed=1")
        for name in ("ttft_seconds", "e2e_seconds", "virtual_seconds", "kv_memory_bytes"):
            assert found[name] == pytest.approx(alone[name])
        mixed = found["roles"]["mixed"]
        for name in ("steps", "hit_rate", "batch_mean", "waste", "stranded"):
            assert mixed[name] == alone[name]


class TestLinks:
    def test_every_profile_has_a_link_of_its_own(self) -> None:
        kinds = {name.partition("-")[0] for name in hardware_names()}
        assert kinds == set(LINKS)
        assert set(LINKS.values()) <= set(hardware_names(LINKS_DIR))

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
        for machine in (MACHINE, CalibratedMachine(MADE)):
            costs = hardware_prices(machine, Links(Link(0.0, 1e9)), layers, 512)
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

"""Load tools of others: their words, their recorded reports, and what the server counted."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bench.load import server_metrics
from bench.load.commands import (
    PATHS,
    Asked,
    OtherName,
    Route,
    Shape,
    aiperf_words,
    guidellm_words,
    vllm_words,
)
from bench.load.reports import ToolFailed, of_aiperf, of_guidellm, of_vllm
from bench.load.server_metrics import told_between, totals
from bench.load.tools import KINDS
from bench.load.verdicts import SERVER_TOLERANCE, WAY_SECONDS, against_server
from kvell.server.metrics.front_metrics import HISTOGRAMS, ServerMetrics
from tests.bench.recorded_reports import NAMES, ROUTES, SHAPE, page, page_text, recorded, told

AT_ONCE = replace(SHAPE, streams=3)


def asked(route: Route = "chat", shape: Shape = SHAPE) -> Asked:
    found = Path("/somewhere/report.json")
    return Asked("http://host:1", "smollm2", Path("/tokens"), route, shape, 7, found)


def option(words: list[str], name: str) -> str:
    """The word behind an option."""
    return words[words.index(name) + 1]


class TestWords:
    @pytest.mark.parametrize("route", ROUTES)
    def test_each_tool_is_sent_to_the_route(self, route: Route) -> None:
        of = asked(route)
        assert f"request_format={PATHS[route]}" in option(guidellm_words(of), "--backend")
        assert option(vllm_words(of), "--endpoint") == PATHS[route]
        assert option(aiperf_words(of), "--endpoint-type") == route

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("shape", [SHAPE, AT_ONCE])
    def test_lengths_numbers_and_places_are_told(self, name: OtherName, shape: Shape) -> None:
        line = shlex.join(KINDS[name].words(asked(shape=shape)))
        for what in ("http://host:1", "smollm2", "/tokens", "/somewhere", "32", "8", "4", "7"):
            assert what in line

    def test_a_rate_is_even_and_never_beside_a_number_of_streams(self) -> None:
        assert option(guidellm_words(asked()), "--profile") == "kind=constant,rate=2"
        at_once = asked(shape=AT_ONCE)
        assert option(guidellm_words(at_once), "--profile") == "kind=concurrent,streams=3"
        assert option(vllm_words(asked()), "--request-rate") == "2.0"
        assert option(vllm_words(at_once), "--max-concurrency") == "3"
        assert "--request-rate" not in vllm_words(at_once)
        assert option(aiperf_words(asked()), "--request-rate-mode") == "constant"
        assert option(aiperf_words(at_once), "--concurrency") == "3"
        assert "--request-rate" not in aiperf_words(at_once)

    def test_aiperf_takes_the_servers_count_where_it_finds_it(self) -> None:
        flags = {route: "--use-server-token-count" in aiperf_words(asked(route)) for route in PATHS}
        assert flags == {"chat": True, "completions": True, "responses": False}
        chunks = {route: "--per-chunk-usage" in aiperf_words(asked(route)) for route in PATHS}
        assert chunks == {"chat": True, "completions": False, "responses": False}

    def test_a_load_has_a_name(self) -> None:
        assert (SHAPE.pace, AT_ONCE.pace) == ("2/s", "3 at once")


class TestReports:
    @pytest.mark.parametrize("name", NAMES)
    def test_counts_of_a_recorded_run(self, name: OtherName) -> None:
        told = KINDS[name].read(recorded(name), SHAPE)
        assert told.counts() == {"requests": 4, "prompt_tokens": 4 * 62, "output_tokens": 4 * 8}

    def test_guidellm_in_seconds_and_without_its_tpot(self) -> None:
        report = recorded("guidellm")
        metrics = report["benchmarks"][0]["metrics"]
        figures = of_guidellm(report, SHAPE).figures
        first = metrics["time_to_first_token_ms"]["successful"]["mean"]
        assert figures["ttft_seconds"] == pytest.approx(first / 1000)
        assert figures["e2e_seconds"] == metrics["request_latency"]["successful"]["mean"]
        apart = (figures["e2e_seconds"] - figures["ttft_seconds"]) / 7
        assert figures["tpot_seconds"] == pytest.approx(apart, rel=0.01)
        whole = metrics["time_per_output_token_ms"]["successful"]["mean"] / 1000
        assert figures["tpot_seconds"] < whole

    def test_aiperf_and_vllm_in_seconds(self) -> None:
        report = recorded("aiperf")
        assert of_aiperf(report, SHAPE).figures == pytest.approx(
            {
                "ttft_seconds": report["time_to_first_token"]["avg"] / 1000,
                "tpot_seconds": report["inter_token_latency"]["avg"] / 1000,
                "e2e_seconds": report["request_latency"]["avg"] / 1000,
            }
        )
        report = recorded("vllm")
        assert of_vllm(report, SHAPE).figures == pytest.approx(
            {
                "ttft_seconds": report["mean_ttft_ms"] / 1000,
                "tpot_seconds": report["mean_tpot_ms"] / 1000,
                "e2e_seconds": report["mean_e2el_ms"] / 1000,
            }
        )

    def test_aiperfs_own_count_of_tokens_is_not_the_servers(self) -> None:
        report = recorded("aiperf")
        for name in ("prompt", "completion"):
            del report[f"total_usage_{name}_tokens"]
        told = of_aiperf(report, SHAPE)
        assert told.counts() == {"requests": 4, "prompt_tokens": None, "output_tokens": None}

    @pytest.mark.parametrize("name", NAMES)
    def test_a_lost_request_spoils_a_run(self, name: OtherName) -> None:
        with pytest.raises(ToolFailed, match="4 of 5 requests"):
            KINDS[name].read(recorded(name), replace(SHAPE, requests=5))


class TestServerMetrics:
    @pytest.mark.parametrize("name", NAMES)
    def test_the_server_counted_what_the_tool_reports(self, name: OtherName) -> None:
        counted = told_between(page(name, "before"), page(name, "after"))
        assert counted.counts() == KINDS[name].read(recorded(name), SHAPE).counts()

    @pytest.mark.parametrize("name", NAMES)
    def test_a_tool_sees_a_token_and_an_end_later_than_the_server(self, name: OtherName) -> None:
        counted = told_between(page(name, "before"), page(name, "after")).figures
        told = KINDS[name].read(recorded(name), SHAPE).figures
        assert told["ttft_seconds"] > counted["ttft_seconds"]
        assert told["e2e_seconds"] > counted["e2e_seconds"]
        assert told["tpot_seconds"] == pytest.approx(counted["tpot_seconds"], rel=0.05)

    def test_only_what_is_new_counts(self) -> None:
        first, last = page("guidellm", "before"), page("vllm", "after")
        assert told_between(first, last).requests == 3 * 4
        assert told_between(page("aiperf", "after"), last).requests == 4
        with pytest.raises(ToolFailed, match="time_to_first_token_seconds counted nothing"):
            told_between(last, last)

    def test_every_end_is_a_request(self) -> None:
        line = 'kvell:request_success_total{model_name="m",finished_reason="cancelled"} 2.0\n'
        text = page_text("guidellm", "after")
        with_cancelled = totals(text + line)
        before = page("guidellm", "before")
        assert told_between(before, with_cancelled).requests == 6

    def test_the_names_are_those_of_the_server(self) -> None:
        metrics = ServerMetrics("m")
        metrics.first_tokens(0.5, 1, 62)
        metrics.next_tokens(0.25, 3)
        after = totals(metrics.render().decode())
        assert (after["prompt_tokens_total"], after["generation_tokens_total"]) == (62, 4)
        assert after["time_to_first_token_seconds_sum"] == 0.5
        assert server_metrics.ENDS in after
        assert set(server_metrics.HISTOGRAMS.values()) <= set(HISTOGRAMS)


class TestVerdicts:
    def test_equal_sides_agree(self) -> None:
        verdicts = against_server("guidellm", told(), told())
        assert [one.figure for one in verdicts] == [*told().counts(), *told().figures]
        assert all(one.agrees and one.difference == 0.0 for one in verdicts)
        assert {(one.tool, one.against) for one in verdicts} == {("guidellm", "/metrics")}

    @pytest.mark.parametrize("off", [-1, 1])
    def test_counts_are_exact(self, off: int) -> None:
        found = against_server("vllm", told(output_tokens=32 + off), told())
        assert [one.figure for one in found if not one.agrees] == ["output_tokens"]
        found = against_server("vllm", told(), told(requests=4 + off))
        assert [one.figure for one in found if not one.agrees] == ["requests"]

    def test_what_a_tool_does_not_say_is_not_judged(self) -> None:
        found = against_server("aiperf", told(output_tokens=None), told())
        assert "output_tokens" not in [one.figure for one in found]

    def test_a_server_that_counted_nothing_differs(self) -> None:
        found = against_server("vllm", told(), told(requests=0))
        assert [one.figure for one in found if not one.agrees] == ["requests"]

    def test_the_way_counts_where_a_figure_has_it(self) -> None:
        way = 0.9 * WAY_SECONDS + 0.1 * SERVER_TOLERANCE
        assert all(
            one.agrees
            for one in against_server(
                "vllm", told(ttft_seconds=0.1 + way, e2e_seconds=0.24 + way), told()
            )
        )
        [late] = [
            one
            for one in against_server("vllm", told(ttft_seconds=0.126), told())
            if not one.agrees
        ]
        assert late.figure == "ttft_seconds"
        assert late.allowed == pytest.approx(SERVER_TOLERANCE + WAY_SECONDS / 0.1)
        [slow] = [
            one
            for one in against_server("vllm", told(tpot_seconds=0.0211), told())
            if not one.agrees
        ]
        assert (slow.figure, slow.allowed) == ("tpot_seconds", SERVER_TOLERANCE)

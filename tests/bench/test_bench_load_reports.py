"""Load tools of others: their words, their recorded reports, and how they are run."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.load.commands import PATH, Asked, OtherName, Shape, guidellm_words, vllm_words
from bench.load.environments import guidellm_python
from bench.load.reports import ToolFailed, of_guidellm, of_vllm
from bench.load.tools import KINDS, OtherTool
from kvell.errors import ChangeSomething

RECORDED = Path("tests/data/load_tools")
"""Reports of one run of each tool: four requests, 8 tokens out; without most of their figures."""
SHAPE = Shape(requests=4, rate=2.0, prompt_tokens=32, output_tokens=8)
NAMES: tuple[OtherName, ...] = get_args(OtherName)


def recorded(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return report


def asked() -> Asked:
    report = Path("/somewhere/report.json")
    return Asked("http://host:1", "smollm2", Path("/tokens"), SHAPE, 7, report)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


class TestWords:
    def test_each_tool_is_sent_to_completions(self) -> None:
        assert f"request_format={PATH}" in option(guidellm_words(asked()), "--backend")
        assert option(vllm_words(asked()), "--endpoint") == PATH

    @pytest.mark.parametrize("name", NAMES)
    def test_lengths_numbers_and_places_are_told(self, name: OtherName) -> None:
        line = shlex.join(KINDS[name].words(asked()))
        for what in ("http://host:1", "smollm2", "/tokens", "/somewhere", "32", "8", "4", "7"):
            assert what in line

    def test_a_rate_is_even(self) -> None:
        assert option(guidellm_words(asked()), "--profile") == "kind=constant,rate=2"
        assert option(vllm_words(asked()), "--request-rate") == "2.0"


class TestReports:
    def test_guidellm_in_seconds_and_without_its_tpot(self) -> None:
        report = recorded("guidellm")
        metrics = report["benchmarks"][0]["metrics"]
        figures = of_guidellm(report, SHAPE)
        first = metrics["time_to_first_token_ms"]["successful"]["mean"]
        assert figures["ttft_seconds"] == pytest.approx(first / 1000)
        assert figures["e2e_seconds"] == metrics["request_latency"]["successful"]["mean"]
        apart = (figures["e2e_seconds"] - figures["ttft_seconds"]) / 7
        assert figures["tpot_seconds"] == pytest.approx(apart, rel=0.01)
        whole = metrics["time_per_output_token_ms"]["successful"]["mean"] / 1000
        assert figures["tpot_seconds"] < whole

    def test_vllm_in_seconds(self) -> None:
        report = recorded("vllm")
        assert of_vllm(report, SHAPE) == pytest.approx(
            {
                "ttft_seconds": report["mean_ttft_ms"] / 1000,
                "tpot_seconds": report["mean_tpot_ms"] / 1000,
                "e2e_seconds": report["mean_e2el_ms"] / 1000,
            }
        )

    @pytest.mark.parametrize("name", NAMES)
    def test_a_lost_request_spoils_a_run(self, name: OtherName) -> None:
        with pytest.raises(ToolFailed, match="4 of 5 requests"):
            KINDS[name].read(recorded(name), replace(SHAPE, requests=5))


Faked = Callable[[str], OtherTool]


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    """GuideLLM as a shell script."""

    def make(body: str) -> OtherTool:
        script = tmp_path / "bin" / "guidellm"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        return OtherTool("guidellm", script.with_name("python"), Path("/tokens"), tmp_path)

    return make


GUIDELLM_BODY = f"""
for word; do
  case $word in
    kind=json,path=*) cp {RECORDED.resolve()}/guidellm.json "${{word#kind=json,path=}}" ;;
  esac
done
echo "$HF_HUB_OFFLINE" > SEEN
"""


class TestProcesses:
    def test_the_report_that_a_tool_wrote_is_read(self, faked: Faked, tmp_path: Path) -> None:
        tool = faked(GUIDELLM_BODY.replace("SEEN", str(tmp_path / "seen")))
        figures = tool.run("http://host:1", "smollm2", SHAPE, 7)
        assert figures == of_guidellm(recorded("guidellm"), SHAPE)
        assert (tmp_path / "seen").read_text() == "1\n"

    def test_an_earlier_report_is_never_read_again(self, faked: Faked, tmp_path: Path) -> None:
        (tmp_path / "guidellm.json").write_text((RECORDED / "guidellm.json").read_text())
        with pytest.raises(ToolFailed, match="wrote no report"):
            faked("exit 0").run("http://host:1", "smollm2", SHAPE, 7)

    def test_a_tool_that_fails_says_why(self, faked: Faked) -> None:
        tool = faked("echo no such route >&2; exit 3")
        with pytest.raises(ToolFailed, match="ended with 3\nno such route"):
            tool.run("http://host:1", "smollm2", SHAPE, 7)


class TestEnvironments:
    def test_one_that_has_the_tool_is_used(self, faked: Faked, tmp_path: Path) -> None:
        tool = faked("exit 0")
        assert guidellm_python(tmp_path) == tool.python

    def test_one_that_cannot_be_made_names_the_flag(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(ChangeSomething) as refused:
            guidellm_python(file)
        assert refused.value.field == "--guidellm-env"

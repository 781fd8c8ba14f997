"""``kvell replay --timeline`` and ``kvell plot``: from a run to a picture."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.cli.plot import default_title

Kvell = Callable[..., Any]


@pytest.fixture
def timeline(kvell: Kvell, tiny_config: Path, tmp_path: Path) -> Path:
    return replayed(kvell, tiny_config, tmp_path / "run.jsonl")


def replayed(kvell: Kvell, config: Path, path: Path, *flags: str) -> Path:
    args = ("--trace", "mmlu-pro", "--limit", "6", "--kv-memory", "8MiB", *flags)
    ended = kvell("replay", *args, "--model", config, "--timeline", path, "--json")
    assert ended.code == 0, ended.stderr
    return path


class TestTimeline:
    def test_a_line_for_each_step(self, kvell: Kvell, tiny_config: Path, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        args = ("--trace", "mmlu-pro", "--limit", "6", "--kv-memory", "8MiB", "--json")
        ended = kvell("replay", *args, "--model", tiny_config, "--timeline", path)
        report, lines = json.loads(ended.stdout), path.read_text().splitlines()
        moments = [json.loads(line) for line in lines]
        assert [m["step"] for m in moments] == list(range(1, report["steps"] + 1))
        assert {m["pool_bytes"] for m in moments} == {report["kv_memory_bytes"]}
        running = sum(m["running"] for m in moments) / len(moments)
        assert running == pytest.approx(report["batch_mean"])
        for index, group in enumerate(report["groups"]):
            needed = sum(m["groups"][index]["needed_bytes"] for m in moments) / len(moments)
            assert needed == pytest.approx(group["needed_bytes_mean"])

    def test_gzipped(self, kvell: Kvell, tiny_config: Path, timeline: Path, tmp_path: Path) -> None:
        path = replayed(kvell, tiny_config, tmp_path / "run.jsonl.gz")
        assert gzip.decompress(path.read_bytes()) == timeline.read_bytes()

    @pytest.mark.parametrize("flag", ["--timeline", "--requests-out"])
    def test_a_place_that_is_none_is_told_before_the_run(
        self, kvell: Kvell, tiny_config: Path, flag: str
    ) -> None:
        ended = kvell("replay", "--trace", "chat", "--model", tiny_config, flag, "/nowhere/t.jsonl")
        assert (ended.code, ended.stdout) == (2, "")
        assert ended.stderr.startswith(f"kvell: {flag}=/nowhere/t.jsonl: is in no directory")

    def test_a_file_that_cannot_be_written(
        self, kvell: Kvell, tiny_config: Path, tmp_path: Path
    ) -> None:
        args = ("--trace", "mmlu-pro", "--limit", "2", "--model", tiny_config)
        ended = kvell("replay", *args, "--timeline", tmp_path / "a.gz" / "..")
        assert ended.code == 2


class TestSessions:
    @pytest.fixture
    def talk(self, tmp_path: Path) -> Path:
        path = tmp_path / "talk.jsonl"
        lines: list[dict[str, Any]] = [
            {"arrival_s": 0.0, "prompt_tokens": 200, "output_tokens": 40, "session": "s"},
            {"arrival_s": 0.0, "prompt_tokens": 300, "output_tokens": 4, "session": "s"},
        ]
        lines[1]["continues"] = True
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    @pytest.mark.parametrize(("flags", "steps"), [((), 44), (("--ignore-sessions",), 41)])
    def test_turns_wait_unless_told(
        self, kvell: Kvell, tiny_config: Path, talk: Path, flags: tuple[str, ...], steps: int
    ) -> None:
        args = ("--trace", talk, "--model", tiny_config, "--kv-memory", "16MiB", *flags)
        ended = kvell("replay", *args, "--json")
        assert ended.code == 0, ended.stderr
        assert abs(json.loads(ended.stdout)["steps"] - steps) <= 1


class TestPlot:
    @pytest.mark.parametrize("name", ["m.png", "m.svg", "m.html"])
    def test_draws_a_file(self, kvell: Kvell, timeline: Path, tmp_path: Path, name: str) -> None:
        ended = kvell("plot", timeline, "--out", tmp_path / name)
        assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")
        assert (tmp_path / name).stat().st_size > 5_000

    def test_several_side_by_side(
        self, kvell: Kvell, tiny_config: Path, timeline: Path, tmp_path: Path
    ) -> None:
        paged = replayed(kvell, tiny_config, tmp_path / "paged.jsonl.gz", "--manager", "paged")
        out = tmp_path / "m.html"
        assert kvell("plot", paged, timeline, "--out", out, "--over", "time").code == 0
        page = out.read_text()
        assert "<th>paged</th>" in page
        assert "<th>run</th>" in page
        titled = ("--title", "one page size", "--title", "Kvell")
        assert kvell("plot", paged, timeline, "--out", out, *titled).code == 0
        assert "<th>one page size</th>" in out.read_text()

    @pytest.mark.parametrize(
        ("path", "title"), [("a/b.jsonl", "b"), ("b.jsonl.gz", "b"), ("b.txt", "b.txt")]
    )
    def test_titles(self, path: str, title: str) -> None:
        assert default_title(Path(path)) == title

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--out", "m.pdf"], "--out=m.pdf: ends in none of .png, .svg, .html"),
            (["--out", "/nowhere/m.png"], "--out=/nowhere/m.png: cannot be written"),
            (["--out", "m.png", "--title", "a", "--title", "b"], "--title=2: are titles for 1"),
            ([], "Missing option '--out'"),
            (["--out", "m.png", "--over", "width"], "Invalid value for '--over'"),
        ],
    )
    def test_one_line(self, kvell: Kvell, timeline: Path, flags: list[str], said: str) -> None:
        ended = kvell("plot", timeline, *flags)
        assert (ended.code, ended.stdout) == (2, "")
        assert said in ended.stderr.splitlines()[-1]

    def test_no_file(self, kvell: Kvell) -> None:
        ended = kvell("plot", "--out", "m.png")
        assert ended.code == 2
        assert "Missing argument" in ended.stderr

    def test_a_file_that_is_no_timeline(self, kvell: Kvell, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text('{"arrival_s": 0}\n')
        ended = kvell("plot", tmp_path / "t.jsonl", "--out", tmp_path / "m.png")
        assert ended.code == 2
        assert f"FILE={tmp_path}/t.jsonl:1: is not a step of a timeline" in ended.stderr

    def test_help_tells_how(self, kvell: Kvell) -> None:
        ended = kvell("plot", "--help")
        assert ended.code == 0
        assert "--timeline paged.jsonl" in ended.stdout

"""The front's bench: what it counts, and that it runs."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.load.front import CREDITS, REQUEST, ReadingEngine, computed_seconds, main
from kvell.engine.protocol.messages import Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import RequestId


def test_time_is_that_of_the_first_thread_and_not_of_others_or_of_waiting() -> None:
    def compute(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    begin = computed_seconds(os.getpid())
    compute(0.05)
    after_own = computed_seconds(os.getpid())
    other = threading.Thread(target=compute, args=(0.2,))
    other.start()
    other.join()
    after_other = computed_seconds(os.getpid())
    assert after_own - begin >= 0.045
    assert after_other - after_own < 0.1


def test_the_instance_gives_a_token_a_step_to_each_of_its_requests() -> None:
    engine = ReadingEngine()
    assert engine.ready().facts.credits == CREDITS
    for name in ("a", "b"):
        engine.handle(
            Submit(RequestSpec(RequestId(name), b"\5\0\0\0" * 3, SamplingParams(max_tokens=9)))
        )
    events = engine.step()
    assert [event.request_id for event in events if isinstance(event, Tokens)] == ["a", "b"]


@pytest.fixture(autouse=True)
def converted(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged model is there already."""
    monkeypatch.setenv("KVELL_CACHE_DIR", str(smollm2_path.parent))


@pytest.mark.long
@pytest.mark.parametrize(("batches", "rounds"), [(("1", "2"), 1), (("1", "2"), 2)])
def test_the_bench_measures_each_batch_and_a_request(
    tmp_path: Path, batches: tuple[str, ...], rounds: int
) -> None:
    path = tmp_path / "front.json"
    sizes = ["--batch", *batches, "--tokens", "8", "--rounds", str(rounds)]
    main([*sizes, "--json", str(path)])
    report = json.loads(path.read_text())
    kinds = [*(f"a token of {batch} requests" for batch in batches), REQUEST]
    assert {kind: len(costs) for kind, costs in report["seconds"].items()} == dict.fromkeys(
        kinds, rounds
    )
    assert report["trees"] == {}


@pytest.mark.long
def test_another_tree_takes_turns_with_this_one(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho $PWD >> {tmp_path}/started\nexec {sys.executable} $@\n")
    python.chmod(0o755)
    (tmp_path / "bench").symlink_to(Path.cwd() / "bench")
    path = tmp_path / "front.json"
    main(
        [
            *("--batch", "2", "--tokens", "8", "--rounds", "3"),
            *("--json", str(path), "--tree", f"before={tmp_path}"),
        ]
    )
    report = json.loads(path.read_text())
    for kind in ("a token of 2 requests", REQUEST):
        both = report["seconds"], report["trees"]["before"]
        assert [len(found[kind]) for found in both] == [3, 3]
    assert (tmp_path / "started").read_text() == f"{tmp_path}\n"

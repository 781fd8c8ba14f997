"""``kvell calibrate`` with a tiny model, and replays that use its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.cli.calibrate import useless
from kvell.cli.main import run
from kvell.cli.terminal.session import Session
from kvell.models.config.configs import config_from_dict
from kvell.models.loading.random_weights import write_random_model
from kvell.vocabulary import GIB

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and its calibration, timed by the real clock."""
    directory = tmp_path_factory.mktemp("calibrated")
    model = write_random_model(directory / "tiny", config_from_dict(LLAMA), 0, scale=1.0)
    out = directory / "tiny.json"
    session = Session(directory / "cache", available_bytes=lambda: GIB)
    flags = ("--dtype", "float32", "--kv-memory", "16MiB", "--quick", "--no-serving", "--json")
    assert run(["calibrate", "--model", str(model), "--out", str(out), *flags], session) == 0
    return model, out


@pytest.fixture
def replay(kvell: Callable[..., Any], made: tuple[Path, Path]) -> Callable[..., Any]:
    def call(hardware: Path, *flags: str) -> Any:
        args = ("--trace", "chat", "--limit", "6", "--kv-memory", "16MiB", "--dtype", "float32")
        where = ("--model", made[0], "--hardware", hardware)
        return kvell("replay", *args, *where, *flags, "--json")

    return call


def changed(made: tuple[Path, Path], to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    raw = json.loads(made[1].read_bytes())
    change(raw)
    to.write_text(json.dumps(raw))
    return to


def test_a_file_with_its_origin(made: tuple[Path, Path]) -> None:
    raw = json.loads(made[1].read_bytes())
    assert raw["kvell_calibration"] == 1
    assert raw["model"]["dtype"] == "float32"
    assert raw["held_out"]["steps"] > 4
    asked_no_server = dict.fromkeys(
        ("request_seconds", "step_seconds", "token_seconds", "prompt_token_seconds"), 0
    )
    assert raw["serving"] == asked_no_server


@pytest.mark.parametrize(("error", "is_useless"), [(0.05, False), (0.25, False), (0.41, True)])
def test_a_useless_calibration_is_named(error: float, is_useless: bool) -> None:
    errors = {"prefill_error": 0.01, "decode_error": error, "mixed_error": 0.02, "noise": 0.3}
    problem = useless(errors)
    assert bool(problem) == is_useless
    if is_useless:
        assert (
            "misses decode steps by 41% (median), and repeats of one step differ by 30%" in problem
        )
        assert "; end other programs and run it again" in problem


def test_a_replay_takes_it(replay: Callable[..., Any], made: tuple[Path, Path]) -> None:
    ended = replay(made[1])
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["completed"] + found["failed"] == 6
    assert 0 < found["tpot_seconds"]["p50"] < found["e2e_seconds"]["p50"]


def test_twice_as_slow(replay: Callable[..., Any], made: tuple[Path, Path], tmp_path: Path) -> None:
    def slower(raw: dict[str, Any]) -> None:
        raw["serving"]["step_seconds"] = 1.0
        raw["serving"]["request_seconds"] = 10.0

    fast = json.loads(replay(made[1]).stdout)
    slow = json.loads(replay(changed(made, tmp_path / "slow.json", slower)).stdout)
    assert slow["tpot_seconds"]["p50"] == pytest.approx(1 + fast["tpot_seconds"]["p50"], rel=0.01)
    assert slow["ttft_seconds"]["p50"] > 10 + fast["ttft_seconds"]["p50"]
    assert slow["steps"] == fast["steps"]


def test_of_another_machine(
    replay: Callable[..., Any], made: tuple[Path, Path], tmp_path: Path
) -> None:
    def elsewhere(raw: dict[str, Any]) -> None:
        raw["machine"]["processor"] = "Z80"

    path = changed(made, tmp_path / "elsewhere.json", elsewhere)
    refused = replay(path)
    assert refused.code == 2
    assert "is stale: processor was Z80, is" in refused.stderr
    assert replay(path, "--any-machine").code == 0


def test_of_another_model(kvell: Callable[..., Any], made: tuple[Path, Path]) -> None:
    flags = ("--trace", "chat", "--limit", "2", "--kv-memory", "16MiB", "--hardware", made[1])
    refused = kvell("replay", *flags, "--model", made[0])  # in bfloat16
    assert refused.code == 2
    assert "is of another model" in refused.stderr


@pytest.mark.parametrize(
    ("content", "problem"), [("{}", "is not a calibration"), (None, "cannot be read")]
)
def test_no_calibration(
    replay: Callable[..., Any], tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    refused = replay(path)
    assert refused.code == 2
    assert problem in refused.stderr


def test_what_cannot_be_calibrated(kvell: Callable[..., Any], tmp_path: Path) -> None:
    refused = kvell("calibrate", "--num-speculative-tokens", "3", "--out", tmp_path / "x.json")
    assert refused.code == 2
    assert "cannot be calibrated" in refused.stderr
    refused = kvell("calibrate", "--out", tmp_path / "nowhere" / "x.json")
    assert refused.code == 2
    assert "--out" in refused.stderr


def test_copies_of_pages_are_measured(made: tuple[Path, Path]) -> None:
    copies = json.loads(made[1].read_bytes())["copies"]
    assert copies["bytes_per_second"] > 0
    assert 0 <= copies["slows"] <= 3
    assert isinstance(copies["are_under_pass"], bool)


def buffered(kvell: Callable[..., Any], made: tuple[Path, Path], hardware: Path, size: str) -> Any:
    """A replay whose pool holds few of its requests at once."""
    return kvell(
        *("replay", "--trace", "chat", "--limit", "60", "--kv-memory", "320KiB", "--json"),
        *("--dtype", "float32", "--model", made[0], "--hardware", hardware, "--cpu-buffer", size),
    )


def test_a_replay_with_a_buffer_takes_what_copies_took(
    kvell: Callable[..., Any], made: tuple[Path, Path], tmp_path: Path
) -> None:
    found = []
    for rate in (1e12, 1e4):

        def paced(raw: dict[str, Any], rate: float = rate) -> None:
            raw["copies"] = {"bytes_per_second": rate, "are_under_pass": False, "slows": 1.0}

        ended = buffered(kvell, made, changed(made, tmp_path / f"{rate}.json", paced), "8MiB")
        assert ended.code == 0, ended.stderr
        found.append(json.loads(ended.stdout))
    fast, slow = found
    assert fast["cpu_buffer"]["out_bytes"] == slow["cpu_buffer"]["out_bytes"] > 0
    moved = sum(fast["cpu_buffer"][way] for way in ("out_bytes", "in_bytes"))
    assert slow["virtual_seconds"] - fast["virtual_seconds"] == pytest.approx(moved / 1e4, rel=0.05)


@pytest.mark.parametrize(
    ("hardware", "size", "problem"),
    [("a100-80", "8MiB", "kvell calibrate"), ("made", "1B", "is less than a large page")],
)
def test_a_buffer_that_could_not_be_replayed_is_refused(
    kvell: Callable[..., Any], made: tuple[Path, Path], hardware: str, size: str, problem: str
) -> None:
    ended = buffered(kvell, made, made[1] if hardware == "made" else Path(hardware), size)
    assert ended.code == 2
    assert "--cpu-buffer" in ended.stderr and problem in ended.stderr

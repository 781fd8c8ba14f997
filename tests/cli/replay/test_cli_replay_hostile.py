"""Traces, timelines and other files of commands that are damaged, or made to harm: one line."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.simulator.traces.formats.fields import MOST_VALUES
from kvell.simulator.traces.lines_file import MOST_BLANK_LINES, MOST_LINE_CHARS
from tests.depth import scaled
from tests.hostile_files import bounded, spoil, spoil_bytes

Kvell = Callable[..., Any]
OWN = [
    {
        "arrival_s": index / 10,
        "prompt_tokens": 64 + index,
        "output_tokens": 3,
        "block_hashes": [1, index + 2],
        "block_tokens": 40,
        "session": f"s{index % 3}",
        "images": [{"start": 3, "tokens": 5, "id": index}],
        "will_return": True,
    }
    for index in range(6)
]
MOONCAKE = [
    {"timestamp": index * 10, "input_length": 1000, "output_length": 4, "hash_ids": [0, index]}
    for index in range(6)
]
SHAREGPT = [
    {
        "id": str(index),
        "conversations": [
            {"from": "human", "value": "hello there"},
            {"from": "gpt", "value": "yes"},
        ],
    }
    for index in range(4)
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + index}.680590,{374 + index},{4 + index}\n" for index in range(6)
)
BURST = "Timestamp,Request tokens,Response tokens,Session ID\n" + "".join(
    f"{5 + index},{472 + index},18,{index % 2}\n" for index in range(6)
)


@pytest.fixture
def replayed(kvell: Kvell, tiny_config: Path, tmp_path: Path) -> Callable[..., Any]:
    def call(data: bytes, name: str, *flags: str) -> Any:
        trace = tmp_path / name
        trace.write_bytes(data)
        args = ("--trace", trace, "--model", tiny_config, "--kv-memory", "16MiB", "--json")
        return kvell("replay", *args, *flags)

    return call


def lines(rows: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


HOSTILE: dict[str, tuple[str, bytes, str]] = {
    "blank lines": ("a.jsonl", b"\n" * 2 * MOST_BLANK_LINES, "blank lines"),
    "long line": ("a.jsonl", b'{"a":"' + b"x" * MOST_LINE_CHARS, "is longer than"),
    "values": ("a.jsonl", b'{"a":[' + b"[]," * MOST_VALUES + b"[]]}", "values"),
    "depth": ("a.jsonl", b'{"a":' * 50_000, "is nested too deeply"),
    "array": ("a.json", b"[" + b" " * (1 << 20) + b"{", "line"),
    "element": ("a.json", b'[{"conversations":[' + b"[]," * 2 * MOST_VALUES, "values"),
    "long text": ("a.json", b'[{"a":"' + b"x" * 2 * MOST_LINE_CHARS, "characters"),
    "bomb": ("a.jsonl.gz", gzip.compress(b" " * (8 << 20)), "expands more than"),
    "cut": ("a.jsonl.gz", gzip.compress(lines(OWN))[:-20], "cannot be read"),
    "no gzip": ("a.jsonl.gz", lines(OWN), "cannot be read"),
    "hashes": ("a.jsonl", lines([OWN[0] | {"block_hashes": {"a": 1}}]), "block_hashes"),
    "nested hashes": ("a.jsonl", lines([OWN[0] | {"block_hashes": [[1], 2]}]), "block_hashes"),
    "large hash": ("a.jsonl", lines([OWN[0] | {"block_hashes": [2**64]}]), "block_hashes"),
    "binary": ("a.jsonl", bytes(range(256)), "cannot be read"),
    "empty": ("a.jsonl", b"", "holds no request"),
}


@pytest.mark.parametrize(("name", "data", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_trace_is_refused(replayed: Any, name: str, data: bytes, problem: str) -> None:
    ended = replayed(data, name)
    assert (ended.code, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert name in line
    assert problem in line


def test_a_timeline_of_other_numbers_is_refused(kvell: Kvell, tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    for text in ("[1e999]", '{"step": Infinity}', "{", "[" * 100_000, "\n" * 2 * MOST_BLANK_LINES):
        file.write_text(text)
        ended = kvell("plot", file, "--out", tmp_path / "a.svg")
        assert (ended.code, len(ended.stderr.splitlines())) == (2, 1), text[:80]


HOSTILE_PROMPTS = [
    json.dumps({"prompt": "\ud800"}),
    '{"prompt_token_ids": [' + "[]," * MOST_VALUES + "[]]}",
    '{"prompt": "' + "x" * (8 << 20) + '"}',
    "[" * 100_000,
    "\0",
]


@pytest.mark.parametrize("text", HOSTILE_PROMPTS)
def test_hostile_prompts_are_refused(kvell: Kvell, tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text + "\n")
    ended = kvell("generate", "--prompts", file)
    assert (ended.code, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert f"--prompts={file}:1" in line


HOSTILE_SETTINGS = [
    "a: &a [1]\nport: *a",
    "a: &a {x: 1}\n" + "\n".join(f"b{i}: &b{i} {{<<: [*a, *a]}}" for i in range(9)),
    "x: " + "a" * (1 << 17),
    "[" * 5000,
    "port: \0",
    "? [1]\n: 2",
]


@pytest.mark.parametrize("text", HOSTILE_SETTINGS)
def test_hostile_settings_are_refused(kvell: Kvell, tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    ended = kvell("generate", "--config", file, "--prompt", "Hi")
    assert (ended.code, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert f"--config={file}" in line


def spoiled_trace(rng: random.Random) -> tuple[str, bytes]:
    """Return the name and the bytes of a trace of any format, with faults."""
    table = rng.choice((AZURE, BURST))
    kind = rng.randrange(4)
    if kind == 0:
        data = table.replace(rng.choice(table.split(",")), str(rng.choice(("", '"', "1" * 5000))))
        raw = data.encode()
    elif kind == 1:
        raw = json.dumps(spoil(SHAREGPT, rng, rng.choice((0, 1, 2)))).encode()
    else:
        rows = spoil(rng.choice((OWN, OWN, MOONCAKE, SHAREGPT)), rng, rng.choice((1, 1, 2)))
        raw = lines(rows)
    if rng.random() < 0.3:
        raw = spoil_bytes(raw, rng)
    if rng.random() < 0.2:
        return "trace.gz", spoil_bytes(gzip.compress(raw), rng)
    return "trace", raw


@pytest.mark.long
@pytest.mark.parametrize("seed", range(scaled(10)))
def test_a_spoiled_trace_is_replayed_or_refused(replayed: Any, seed: int) -> None:
    rng = random.Random(seed)
    replayed(lines(OWN), "trace")
    for _ in range(100):
        name, data = spoiled_trace(rng)
        with bounded(len(data)):
            ended = replayed(data, name, *rng.choice(((), ("--rate", "10"), ("--repeat", "2"))))
        assert ended.code in (0, 2), (data, ended.stderr)
        if ended.code == 2:
            assert len(ended.stderr.splitlines()) <= 2, data

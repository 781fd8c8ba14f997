"""``kvell replay --trace`` with published traces: texts become tokens, and reports stay JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

Kvell = Callable[..., Any]
TALK = {"conversations": [{"from": "human", "value": "a b c d e f g"},
                          {"from": "gpt", "value": "four"},
                          {"from": "human", "value": "five"},
                          {"from": "gpt", "value": "six seven"}]}  # fmt: skip


@pytest.fixture
def replayed(kvell: Kvell, tiny_config: Path, tmp_path: Path) -> Callable[..., Any]:
    def call(text: str, *flags: str) -> Any:
        trace = tmp_path / "trace"
        trace.write_text(text)
        args = ("--trace", trace, "--model", tiny_config, "--kv-memory", "16MiB", "--json")
        return kvell("replay", *args, "--requests-out", tmp_path / "requests", *flags)

    return call


def prompts(tmp_path: Path) -> list[int]:
    lines = (tmp_path / "requests").read_text().splitlines()
    return [json.loads(line)["prompt_tokens"] for line in lines]


def test_without_a_tokenizer_tokens_are_about_four_bytes(replayed: Any, tmp_path: Path) -> None:
    ended = replayed(json.dumps([TALK]))
    assert ended.code == 0, ended.stderr
    assert "config.json has no tokenizer here: 4 bytes of text count as a token" in ended.stderr
    assert prompts(tmp_path) == [4, 4 + 1 + 1]


def test_texts_are_counted_by_the_models_tokenizer(replayed: Any, tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ended = replayed(json.dumps([TALK]))
    assert ended.code == 0, ended.stderr
    assert "has no tokenizer" not in ended.stderr
    assert prompts(tmp_path) == [7, 7 + 1 + 1]
    assert json.loads(ended.stdout)["requests_finished"] == 2


def bailian(number: int, last: int) -> dict[str, object]:
    chat = {"chat_id": number, "parent_chat_id": -1, "type": "text", "turn": 1}
    return {
        **chat,
        "timestamp": 0.5 * number,
        "input_length": 64,
        "output_length": 2,
        "hash_ids": ["0a", "0b", "0c", f"{last:x}"],
    }


@pytest.mark.parametrize(("flags", "hit_tokens"), [((), 48), (("--block-tokens", "32"), 64 - 1)])
def test_blocks_of_bailian_have_the_size_of_the_flag(
    replayed: Any, flags: tuple[str, ...], hit_tokens: int
) -> None:
    lines = [bailian(number, 90 + number) for number in range(2)]
    if flags:  # two blocks of 32 tokens
        lines = [line | {"hash_ids": ["0a", "0b"]} for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    ended = replayed(text, "--arrivals", "trace", *flags)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["hit_rate"] == pytest.approx(hit_tokens / 128)


def test_a_generator_takes_no_size_of_blocks(kvell: Kvell, tiny_config: Path) -> None:
    args = ("--trace", "chat", "--model", tiny_config, "--kv-memory", "16MiB")
    ended = kvell("replay", *args, "--block-tokens", "32")
    assert ended.code == 2 and "--block-tokens=32: is of files" in ended.stderr


def test_what_is_left_out_is_told(replayed: Any) -> None:
    text = "Timestamp,Request tokens,Response tokens\n5,40,0\n6,40,3\n"
    ended = replayed(text)
    assert ended.code == 0 and json.loads(ended.stdout)["requests_finished"] == 1
    assert "left out requests without prompt or output tokens: 1" in ended.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "nan"),
        ("--rate", "inf"),
        ("--rate", "1e-320"),
        ("--slo-ttft", "inf"),
        ("--slo-tpot", "nan"),
        ("--hints", "nan"),
        ("--num-speculative-tokens", "2", "--acceptance", "nan"),
    ],
)
def test_flags_are_finite(replayed: Any, flags: tuple[str, ...]) -> None:
    ended = replayed("Timestamp,Request tokens,Response tokens\n5,40,3\n", *flags)
    assert ended.code == 2 and flags[-2] in ended.stderr


def test_the_longest_times_give_json(replayed: Any) -> None:
    line = {"prompt_tokens": 9, "output_tokens": 2}
    text = "".join(json.dumps({"arrival_s": at, **line}) + "\n" for at in (0, 1e10))
    ended = replayed(text, "--arrivals", "trace", "--repeat", "3")
    assert ended.code == 0, ended.stderr
    assert "NaN" not in ended.stdout and "Infinity" not in ended.stdout

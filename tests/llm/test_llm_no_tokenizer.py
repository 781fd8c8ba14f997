"""A model directory without a tokenizer serves prompts of token ids."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvell import LLM, SamplingParams
from kvell.cli.main import run
from kvell.cli.terminal.session import Session
from kvell.errors import ChangeSomething
from kvell.models.loading.random_weights import write_random_model
from kvell.vocabulary import MIB
from tests.models.harness import tiny_config

PROMPT = list(range(3, 20))
SAMPLING = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("bare"), tiny_config("LlamaForCausalLM"), seed=1
    )


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    yield LLM(str(directory), kv_memory_bytes=4 * MIB, dtype="float32")


def test_token_ids_are_answered_with_token_ids(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": PROMPT}, SAMPLING)
    assert output.prompt_token_ids == PROMPT
    assert len(output.token_ids) == 5
    assert output.text == ""
    assert output.finish_reason == "length"


def test_texts_are_refused_and_the_remedy_works(llm: LLM, directory: Path) -> None:
    with pytest.raises(ChangeSomething, match="holds no tokenizer") as told:
        llm.generate("Hello", SAMPLING)
    assert told.value.value == directory
    assert "prompts as token ids" in told.value.remedy
    with pytest.raises(ChangeSomething, match="holds no tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}], SAMPLING)


def test_stop_strings_are_refused(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=5, stop=("x",))
    with pytest.raises(ChangeSomething, match="needs the model's tokenizer") as told:
        llm.generate({"prompt_token_ids": PROMPT}, sampling)
    assert told.value.field == "stop"
    worded = SamplingParams(max_tokens=5, bad_words=("x",))
    with pytest.raises(ChangeSomething, match="bad_words=x: needs the model's tokenizer"):
        llm.generate({"prompt_token_ids": PROMPT}, worded)


def test_the_command_line_takes_token_ids(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": PROMPT, "max_tokens": 4}))
    asked = ["generate", "--model", str(directory), "--prompts", str(prompts), "--json"]
    flags = ["--kv-memory", "4MiB", "--dtype", "float32", "--ignore-eos"]
    assert run([*asked, *flags], Session(cache_dir=tmp_path)) == 0
    [request] = json.loads(capsys.readouterr().out)["requests"]
    assert len(request["token_ids"]) == 4

"""Directories of models as they lie in hubs and on disks: served, or refused by the file's name."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.loading.loading import check_model, load_paged_model
from kvell.models.loading.random_weights import write_random_model
from kvell.models.sources.named_sources import NamedSource, named_source, named_sources
from kvell.models.text import tokenizer as tokenizer_faults
from kvell.models.text.tokenizer import Tokenizer, holds_tokenizer
from tests.models.cases import long_unless
from tests.models.harness import tiny_config

Mutilate = Callable[[Path], object]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
PAGE = "<!DOCTYPE html>\n<html><title>404</title></html>" * 20
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BYTES = [
    {"rank": one, "token_bytes": base64.b64encode(bytes([one])).decode(), "token_str": None}
    for one in range(256)
]
TEKKEN = {
    "config": {
        "pattern": r"\S+|\s+",
        "num_vocab_tokens": 256,
        "default_vocab_size": 258,
        "default_num_special_tokens": 2,
        "version": "v3",
    },
    "vocab": BYTES,
    "special_tokens": [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(("<unk>", "<s>"))
    ],
}


def holds(name: str, content: object) -> Mutilate:
    """A file of this name holds this: a text, bytes, or a value as JSON."""

    def write(path: Path) -> None:
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text)

    return write


def is_named(name: str) -> Mutilate:
    return lambda path: (path / WEIGHTS).rename(path / name)


def cut(name: str, length: int) -> Mutilate:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:length])


def dangles(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).symlink_to("/nowhere/blobs/4d7a")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("LlamaForCausalLM")
    return write_random_model(tmp_path_factory.mktemp("hub") / "llama", config, seed=5)


BROKEN_MODELS: list[tuple[Mutilate, str, str]] = [
    (holds(WEIGHTS, LFS), WEIGHTS, "is a pointer of git-lfs"),
    (holds(WEIGHTS, ""), WEIGHTS, "is empty"),
    (holds(WEIGHTS, PAGE), WEIGHTS, "is a web page"),
    (cut(WEIGHTS, 4), WEIGHTS, "its header is damaged"),
    (cut(WEIGHTS, 100), WEIGHTS, "its header is damaged"),
    (cut(WEIGHTS, -1), WEIGHTS, "bytes instead of"),
    (dangles, WEIGHTS, "is a link to /nowhere/blobs/4d7a, which is missing"),
    (lambda path: (path / WEIGHTS).unlink(), WEIGHTS, "is missing"),
    (is_named("pytorch_model.bin"), "pytorch_model.bin", "is a pickle, which is not read"),
    (
        is_named("model-q4_0.gguf"),
        "model-q4_0.gguf",
        "is a GGUF file; name the file itself as the model",
    ),
    (is_named("consolidated.safetensors"), "consolidated.safetensors", "form of transformers"),
    (is_named("model-00001-of-00002.safetensors"), "model-00002-of-00002", "is missing"),
    (is_named("model-00003-of-00002.safetensors"), "model-00001-of-00002", "is missing"),
    (is_named("model-00001-of-00000.safetensors"), WEIGHTS, "is missing"),
    (holds(INDEX, LFS), INDEX, "is a pointer of git-lfs"),
    (holds(INDEX, "{"), INDEX, "is not valid JSON"),
    (holds(INDEX, {"weight_map": ["a"]}), INDEX, "its weight_map does not say"),
    (holds(INDEX, {"weight_map": None}), INDEX, "its weight_map does not say"),
    (holds(INDEX, {"weight_map": {"a": 3}}), INDEX, "its weight_map does not say"),
    (
        holds(INDEX, {"weight_map": {"a": "model-00002-of-00002.safetensors"}}),
        "model-00002-of-00002.safetensors",
        "is missing",
    ),
    (holds("config.json", LFS), "config.json", "is a pointer of git-lfs"),
    (holds("config.json", ""), "config.json", "is empty"),
    (holds("config.json", "{"), "config.json", "is not valid JSON"),
    (holds("config.json", b"\xff\xfe\x00"), "config.json", "is not valid JSON"),
    (holds("config.json", []), "config.json", "holds no JSON object"),
    (holds("config.json", {}), "config.json", "names no model_type"),
    (holds("config.json", {"model_type": "no_such"}), "no_such", "unknown model type"),
    (lambda path: (path / "config.json").unlink(), "config.json", "holds no config.json"),
]


@pytest.mark.parametrize(("mutilate", "name", "problem"), BROKEN_MODELS)
def test_a_broken_model_is_refused_by_its_file(
    saved: Path, tmp_path: Path, mutilate: Mutilate, name: str, problem: str
) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    mutilate(path)
    with pytest.raises(ChangeSomething) as refused:
        check_model(path)
        load_paged_model(path, PortableKernels())
    assert refused.value.field == "model"
    assert name in str(refused.value) and problem in str(refused.value)


def test_weights_in_several_files_are_served(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(saved, tmp_path / "model"))
    tensors = load_file(path / WEIGHTS)
    whole = load_paged_model(saved, PortableKernels()).weight_bytes
    (path / WEIGHTS).unlink()
    placed: dict[str, str] = {}
    for index, some in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        name = f"model-0000{index + 1}-of-00002.safetensors"
        save_file({one: tensors[one] for one in some}, path / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(some, name)
    holds(INDEX, {"metadata": {"total_size": 1}, "weight_map": placed})(path)
    assert load_paged_model(path, PortableKernels()).weight_bytes == whole


@pytest.fixture
def tokenizer_only(smollm2_path: Path, tmp_path: Path) -> Path:
    """The packaged model's config and ``tokenizer.json``."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(smollm2_path / name, tmp_path)
    return tmp_path


def as_vocabulary_and_merges(path: Path) -> None:
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    pairs = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    holds("vocab.json", model["vocab"])(path)
    holds("merges.txt", "\n".join(["#version: 0.2", *pairs]))(path)
    holds("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})(path)
    (path / "tokenizer.json").unlink()


def as_words(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    holds("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n")(path)
    holds("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})(path)


def as_tekken(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    holds("tekken.json", TEKKEN)(path)


SERVED: list[Mutilate] = [
    lambda path: None,
    lambda path: (path / "config.json").unlink(),
    holds("tokenizer_config.json", {"tokenizer_class": "NoSuchTokenizer"}),
    holds("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}),
    as_vocabulary_and_merges,
    as_words,
    as_tekken,
]


@pytest.mark.parametrize("change", SERVED)
def test_a_tokenizer_is_read_from_the_files_that_there_are(
    tokenizer_only: Path, change: Mutilate
) -> None:
    change(tokenizer_only)
    assert holds_tokenizer(tokenizer_only)
    found = Tokenizer.load(tokenizer_only)
    assert found.decode(found.encode("hello world")) == "hello world"


def without(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return remove


def both(first: Mutilate, second: Mutilate) -> Mutilate:
    return lambda path: (first(path), second(path))


ONLY = without("tokenizer.json")
OWN_CODE: Any = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
BROKEN_TOKENIZERS: list[tuple[Mutilate, str, str]] = [
    (holds("tokenizer.json", LFS), "tokenizer.json", "is a pointer of git-lfs"),
    (holds("tokenizer.json", ""), "tokenizer.json", "is empty"),
    (cut("tokenizer.json", 1000), "tokenizer.json", "is not valid JSON"),
    (holds("tokenizer_config.json", "{"), "tokenizer_config.json", "is not valid JSON"),
    (holds("tokenizer_config.json", []), "tokenizer_config.json", "holds no JSON object"),
    (holds("special_tokens_map.json", "{"), "special_tokens_map.json", "is not valid JSON"),
    (holds("generation_config.json", "{"), "generation_config.json", "is not valid JSON"),
    (holds("chat_template.json", "{"), "chat_template.json", "is not valid JSON"),
    (holds("chat_template.jinja", b"caf\xe9"), "chat_template.jinja", "is not UTF-8 text"),
    (
        holds("tokenizer_config.json", {"model_max_length": "long"}),
        "",
        "its tokenizer does not load",
    ),
    (holds("tokenizer_config.json", {"chat_template": 7}), "tokenizer_config.json", "is not text"),
    (
        holds("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        "",
        "its tokenizer does not load ('template' is missing)",
    ),
    (both(ONLY, holds("tokenizer.model", LFS)), "tokenizer.model", "is a pointer of git-lfs"),
    (
        both(ONLY, holds("tokenizer.model", b"\n\x0e\n\x05<unk>")),
        "tokenizer.model",
        "needs the package sentencepiece, which is not installed; run: pip install sentencepiece",
    ),
    (both(as_vocabulary_and_merges, without("merges.txt")), "vocab.json", "merges.txt is missing"),
    (both(as_vocabulary_and_merges, holds("merges.txt", LFS)), "merges.txt", "git-lfs"),
    (
        both(as_vocabulary_and_merges, without("tokenizer_config.json")),
        "tokenizer_config.json",
        "does not name a tokenizer_class",
    ),
    (
        both(as_vocabulary_and_merges, holds("tokenizer_config.json", OWN_CODE)),
        "tokenization_own.Own",
        "is custom code (tokenization_own.Own), which is not run",
    ),
    (both(ONLY, holds("tekken.json", "{")), "tekken.json", "is not valid JSON"),
    (both(ONLY, holds("tekken.json", {"vocab": []})), "", "its tokenizer does not load"),
    (ONLY, "", "holds no tokenizer"),
]


@pytest.mark.parametrize(
    ("mutilate", "name", "problem"),
    [
        pytest.param(*case, marks=long_unless(index % 3 == 0))
        for index, case in enumerate(BROKEN_TOKENIZERS)
    ],
)
def test_a_broken_tokenizer_is_refused_by_its_file(
    tokenizer_only: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutilate: Mutilate,
    name: str,
    problem: str,
) -> None:
    monkeypatch.setattr(tokenizer_faults, "find_spec", lambda name: None)
    mutilate(tokenizer_only)
    with pytest.raises(ChangeSomething) as refused:
        Tokenizer.load(tokenizer_only)
    assert refused.value.field == "model"
    assert name in str(refused.value) and problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("smollm2", "smollm2", "smollm2"),
        ("owner/name", "owner/name", "owner/name"),
        ("small=owner/name", "small", "owner/name"),
        ("small=./some=dir", "small", "./some=dir"),
        ("./some=dir", "./some=dir", "./some=dir"),
        ("", "", ""),
    ],
)
def test_a_model_has_its_own_name_unless_it_is_given_one(text: str, name: str, source: str) -> None:
    assert named_source(text) == NamedSource(name, source)


def test_a_directory_that_is_there_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named_source("a=b") == NamedSource("a=b", "a=b")


def test_every_name_once() -> None:
    assert [one.name for one in named_sources("a", ["b=a", "c=a"])] == ["a", "b", "c"]
    with pytest.raises(ChangeSomething, match="is the name of two models") as told:
        named_sources("a", ["b=x", "a=y"])
    assert (told.value.field, told.value.value) == ("model", "a")

"""GGUF files that are damaged, cut, unknown or moved, and the directories that are made of them."""

import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.errors import ChangeSomething
from kvell.models.gguf.gguf_file import read_gguf
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.model_weights import weight_files_bytes
from kvell.models.loading.stored_model import stored_model
from kvell.models.sources.gguf_directory import gguf_directory, gguf_source
from kvell.models.sources.hub_files import HubFile, hub_file
from kvell.models.sources.source import resolve_model
from kvell.models.text.end_tokens import eos_token_ids
from kvell.models.text.tokenizer import tokenizer_or_none
from tests.models.gguf.gguf_models import ENDS, TEMPLATE, Writer, family_module
from tests.models.harness import prompt_ids, runner_over

CPU = torch.device("cpu")
MEMORY_BYTES = 64 << 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a vocabulary and matrices of three types."""
    file = tmp_path_factory.mktemp("gguf") / "good.gguf"
    module = family_module("llama", num_hidden_layers=2)
    kinds = {"token_embd.weight": "Q8_0", "output.weight": "Q6_K"}
    Writer("llama", module, lambda name: kinds.get(name, "Q4_K")).write(file, rules="llama-bpe")
    return file


def answers(file: Path, cache: Path) -> torch.Tensor:
    """Load a file as a server does, and compute a step; float32 [tokens, vocab]."""
    directory = gguf_directory(file, cache)
    model = load_paged_model(directory, choose_kernels(CPU))
    return runner_over(model).step([("a", prompt_ids(9))])


def header_bytes(file: Path) -> int:
    return min(tensor.start for tensor in read_gguf(file).tensors.values())


def mutated(data: bytes, header: int, draw: random.Random) -> bytes:
    """Damage a file: a cut, flipped bits of the header, a huge number, or bytes elsewhere."""
    kind = draw.choice(["cut", "flip", "huge", "moved", "zeros"])
    at = draw.randrange(header)
    if kind == "cut":
        return data[: draw.randrange(len(data))]
    made = bytearray(data)
    if kind == "flip":
        for _ in range(draw.randrange(1, 4)):
            made[draw.randrange(header)] ^= 1 << draw.randrange(8)
    elif kind == "huge":
        number = draw.choice([(1 << 64) - 1, 1 << 63, 1 << 40, 1 << 31, len(data), 0])
        made[at : at + 8] = struct.pack("<Q", number)
    elif kind == "moved":
        other = draw.randrange(header)
        made[at : at + 16] = data[other : other + 16]
    else:
        made[at : at + draw.randrange(1, 64)] = b""
    return bytes(made)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_a_damaged_file_is_refused_or_read_as_it_is(seed: int, good: Path, tmp_path: Path) -> None:
    """Neither crash nor hang, and no memory beyond the file's size and 64 MiB."""
    data, header = good.read_bytes(), header_bytes(good)
    wanted = answers(good, tmp_path / "good")
    refused = equal = 0
    for index in range(125):
        file = tmp_path / f"{index}.gguf"
        file.write_bytes(mutated(data, header, random.Random(f"{seed}/{index}")))
        tracemalloc.start()
        try:
            equal += torch.equal(answers(file, tmp_path / "cache"), wanted)
        except ChangeSomething as error:
            refused += 1
            assert error.field in ("model", "--quantization"), error
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes <= file.stat().st_size + MEMORY_BYTES
        file.unlink()
    assert refused > 60
    assert equal > 0


def test_a_file_has_its_tokenizer_and_template(good: Path, tmp_path: Path) -> None:
    directory = resolve_model(str(good), tmp_path)
    tokenizer = tokenizer_or_none(directory)
    ids = tokenizer.encode("hello world").tolist()
    assert ids[0] == 0, "texts of Llama 3 begin with a token"
    assert tokenizer.decode(ids[1:]) == "hello world"
    assert len(ids) < 6
    assert tokenizer.encode(ENDS[1]).tolist() == [0, 2]
    assert eos_token_ids(directory) == {1, 2}
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE


def test_a_directory_is_made_again_when_the_file_changes(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(good.read_bytes())
    directory = gguf_directory(file, tmp_path)
    written = (directory / "config.json").stat().st_mtime_ns
    assert gguf_directory(file, tmp_path) == directory
    assert (directory / "config.json").stat().st_mtime_ns == written
    assert gguf_source(directory) == file
    module = family_module("qwen3")
    Writer("qwen3", module, lambda _: "F16").write(file)
    assert gguf_directory(file, tmp_path) == directory
    assert '"qwen3"' in (directory / "config.json").read_text()
    assert not (directory / "tokenizer.json").exists(), "this file has no vocabulary"


def test_parts_may_be_links_to_files_of_other_names(tmp_path: Path) -> None:
    """As in the hub's cache."""
    module = family_module("llama", num_hidden_layers=2)
    Writer("llama", module, lambda _: "F16").write(tmp_path / "m.gguf", parts_of=9)
    linked = tmp_path / "linked"
    linked.mkdir()
    for number, part in enumerate(sorted(tmp_path.glob("m-*.gguf"))):
        (linked / part.name).symlink_to(part.rename(tmp_path / f"blob{number}"))
    [first, *_] = sorted(linked.iterdir())
    assert answers(first, tmp_path / "cache").isfinite().all()


def test_a_model_is_as_large_as_its_file(good: Path, tmp_path: Path) -> None:
    directory = gguf_directory(good, tmp_path)
    tensors = read_gguf(good).tensors.values()
    assert weight_files_bytes(directory) == sum(t.size_bytes for t in tensors)
    facts = stored_model(directory, object())
    assert facts.is_gguf
    assert facts.size_bytes == good.stat().st_size
    module = family_module("llama", num_hidden_layers=2)
    assert facts.parameters == sum(parameter.numel() for parameter in module.parameters())


def test_a_file_that_is_gone_is_named(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(good.read_bytes())
    directory = gguf_directory(file, tmp_path)
    file.unlink()
    with pytest.raises(ChangeSomething, match=r"model\.gguf: is missing"):
        load_paged_model(directory, choose_kernels(CPU))


def write_refused(path: Path, how: str) -> None:
    family, kind, rules = "llama", "F32", ""
    if how == "type":
        kind = "TQ1_0"
    elif how == "rules":
        rules = "a-new-one"
    module = family_module(family, num_hidden_layers=2)
    if how == "tensor":
        module.register_parameter("cls", torch.nn.Parameter(torch.ones(4)))
    writer = Writer(family, module, lambda _: kind)
    writer.write(path, rules=rules)


def write_architecture(path: Path, _: str) -> None:
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIZES = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
)


@pytest.mark.parametrize("number", [0, 1, 3, 1 << 20, (1 << 31) - 1, (1 << 32) - 1])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_the_tensors_do_not_have_is_refused(
    key: str, number: int, good: Path, tmp_path: Path
) -> None:
    """A context alone may have any length: only pages are taken for it."""
    data = good.read_bytes()
    at = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    file = tmp_path / "model.gguf"
    file.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
    tracemalloc.start()
    try:
        if key == "context_length" and 0 < number < 1 << 31:
            assert answers(file, tmp_path / "cache").isfinite().all()
        else:
            with pytest.raises(ChangeSomething):
                answers(file, tmp_path / "cache")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= len(data) + MEMORY_BYTES


def write_part(path: Path, how: str) -> None:
    module = family_module("llama", num_hidden_layers=2)
    Writer("llama", module, lambda _: "F16").write(path.with_name("m.gguf"), parts_of=9)
    first, second, *_ = sorted(path.parent.glob("m-*.gguf"))
    path.touch()
    if how == "missing part":
        second.unlink()
    elif how == "part twice":
        second.write_bytes(first.read_bytes())
    if how == "name":
        first.rename(path)


def write_bytes(path: Path, how: str) -> None:
    texts = {
        "empty": b"",
        "page": b"<!DOCTYPE html><html>",
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "zip": b"PK\x03\x04" + bytes(99),
        "version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        "big": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "counts": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    }
    path.write_bytes(texts[how])


@pytest.mark.parametrize(
    ("write", "how", "problem"),
    [
        (write_refused, "type", "of type TQ1_0, which is not read"),
        (write_refused, "tensor", "has the tensor 'cls.weight', which is not read of llama"),
        (write_refused, "rules", "has a tokenizer of the kind 'gpt2', 'a-new-one'"),
        (write_architecture, "", "has the architecture 'rwkv7', which is not read from GGUF"),
        (write_part, "missing part", "is missing"),
        (write_part, "part twice", "is not part 2 of"),
        (write_part, "name", "whose name does not end in"),
        (write_bytes, "empty", "is empty"),
        (write_bytes, "page", "is a web page in place of the file"),
        (write_bytes, "pointer", "is a pointer of git-lfs"),
        (write_bytes, "zip", "is not a GGUF file"),
        (write_bytes, "version", "has version 1"),
        (write_bytes, "big", "is for big-endian machines"),
        (write_bytes, "counts", "it says 1152921504606846976 tensors"),
    ],
)
def test_files_that_are_not_read_say_why(
    write: Callable[[Path, str], None], how: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write(file, how)
    [*parts] = tmp_path.glob("m-*1-of-*.gguf")
    file = parts[0] if parts else file
    with pytest.raises(ChangeSomething) as refused:
        answers(file, tmp_path / "cache")
    assert problem in f"{refused.value}"
    assert refused.value.remedy
    assert not [*tmp_path.glob("cache/gguf/*")], "nothing is left of a file that is refused"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("owner/name:Q4_K_M", HubFile("owner/name", "Q4_K_M")),
        ("owner/name:q4_k_m", HubFile("owner/name", "q4_k_m")),
        ("owner/name:UD-Q2_K_XL", HubFile("owner/name", "UD-Q2_K_XL")),
        ("owner/name:IQ4_NL", HubFile("owner/name", "IQ4_NL")),
        ("hf.co/owner/name:BF16", HubFile("owner/name", "BF16")),
        ("https://huggingface.co/owner/name-GGUF", HubFile("owner/name-GGUF", "Q4_K_M")),
        ("owner/name-GGUF", None),
        ("owner/name", None),
        ("library/qwen3:0.6b", None),
        ("hf.co/owner/name", None),
        ("qwen3:q4_K_M", None),
        ("./a/b:Q8_0", None),
    ],
)
def test_a_name_means_a_file_of_the_hub(model: str, wanted: HubFile | None) -> None:
    assert hub_file(model) == wanted


@pytest.mark.parametrize("model", ["owner/name:q4_k", "hf.co/owner/name:Q4_K"])
def test_the_file_of_a_type_is_fetched_and_read(model: str, good: Path, tmp_path: Path) -> None:
    """Neither a file of a type that begins alike nor the encoder of images."""
    asked: list[tuple[str, Sequence[str]]] = []

    def fetch(repository: str, patterns: Sequence[str]) -> Path:
        asked.append((repository, patterns))
        return hub

    hub = tmp_path / "hub"
    (hub / "in").mkdir(parents=True)
    for name in ("mmproj-model-Q4_K.gguf", "model-Q4_K_M.gguf", "model-XQ4_K.gguf"):
        (hub / name).write_bytes(b"another")
    (hub / "in" / "model-Q4_K.gguf").write_bytes(good.read_bytes())
    directory = resolve_model(model, tmp_path / "cache", fetch=fetch)
    assert gguf_source(directory) == hub / "in" / "model-Q4_K.gguf"
    [(repository, patterns)] = asked
    assert repository == "owner/name"
    assert any(fnmatch(f"in/model-{tag}.gguf", p) for p in patterns for tag in ("Q4_K", "q4_k"))
    assert any(fnmatch("model-Q4_K-00001-of-00002.gguf", pattern) for pattern in patterns)
    assert not any(fnmatch("model-Q4_K_M.gguf", pattern) for pattern in patterns)
    with pytest.raises(ChangeSomething, match="has no GGUF file of the type Q2_K; name a type"):
        resolve_model("owner/name:Q2_K", tmp_path / "cache", fetch=fetch)

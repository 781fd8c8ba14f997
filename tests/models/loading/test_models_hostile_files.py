"""Weight files, indexes and configs that are made to harm: one line for each, and little memory."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.models.config.config_values import MOST_LAYERS
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.models.config.json_files import MAX_JSON_BYTES, MOST_VALUES
from kvell.models.loading.loading import check_model
from kvell.models.loading.weight_files import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    read_weight_map,
)

A = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
B = {"dtype": "F16", "shape": [2, 2], "data_offsets": [16, 24]}
DATA = bytes(24)
MEMORY_BYTES = 64 << 20
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def write_weights(
    path: Path, header: object, data: bytes = DATA, length: int | None = None
) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    (path / SINGLE_FILE).write_bytes(struct.pack("<Q", size) + raw + data)


def refusal(path: Path) -> ChangeSomething:
    """Return the one error of the weight files, which takes no more memory than files may."""
    file_bytes = sum(file.stat().st_size for file in path.iterdir())
    tracemalloc.start()
    try:
        with pytest.raises(ChangeSomething) as caught:
            read_weight_map(path)
        assert tracemalloc.get_traced_memory()[1] <= file_bytes + MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return caught.value


def test_tensors_that_fill_their_file_are_mapped(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0, 3], "data_offsets": [16, 16]}
    write_weights(tmp_path, {"a": A, "b": B, "c": empty, "__metadata__": {"format": "pt"}})
    tensors = read_weight_map(tmp_path).map_tensors()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"a": (4,), "b": (2, 2), "c": (0, 3)}


ODD_HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"a": A | {"data_offsets": []}}, "data_offsets"),
    ({"a": A | {"data_offsets": "x"}}, "data_offsets"),
    ({"a": A | {"data_offsets": [-16, 0]}}, "data_offsets"),
    ({"a": A | {"data_offsets": [0, 2**70]}}, "tensor 'a'"),
    ({"a": A | {"data_offsets": [16, 0]}}, "has -16 bytes"),
    ({"a": A | {"data_offsets": [8, 24]}}, "begins at byte 8 of the data instead of 0"),
    ({"a": A, "b": B | {"data_offsets": [8, 16]}}, "begins at byte 8 of the data instead of 16"),
    ({"a": A | {"shape": None}}, "shape"),
    ({"a": A | {"shape": [2**62, 2**62]}}, "tensor 'a'"),
    ({"a": A | {"shape": [1.5]}}, "shape"),
    ({"a": A | {"shape": [1] * 2000}}, "shape"),
    ({"a": A | {"dtype": "I1"}}, "unknown dtype 'I1'"),
    ({"a": A | {"dtype": []}}, "dtype"),
    ({"a": None}, "tensor 'a'"),
    ({"a": A, "__metadata__": {"format": 1}}, "__metadata__"),
    ({"a\n" * 5000: None}, "tensor 'a\\na"),
    ({"a": A}, "bytes instead of"),
]


@pytest.mark.parametrize(("header", "problem"), ODD_HEADERS)
def test_an_odd_entry_is_named(tmp_path: Path, header: object, problem: str) -> None:
    write_weights(tmp_path, header)
    assert problem in refusal(tmp_path).problem


ODD_BYTES: list[tuple[bytes, int | None]] = [
    (b"{}", 0),
    (b"{}", 2**64 - 1),
    (b"{}", MAX_HEADER_BYTES),
    (b"[" * 200_000, None),
    (b'{"a":' * 200_000, None),
    (bytes(100), None),
    (b"\xef\xbb\xbf{}", None),
    (b'{"\xff":1}', None),
    (b"[]", None),
    (b'{"__metadata__":{' + b'"":"",' * 400_000 + b'"":""}}', None),
    (b'{"a":{"shape":[' + b"0," * (2 << 20) + b"0]}}", None),
    (b"{" + b'"a":{},' * 400_000 + b'"a":{}}', None),
]


@pytest.mark.parametrize(("header", "length"), ODD_BYTES)
def test_an_odd_header_is_refused(tmp_path: Path, header: bytes, length: int | None) -> None:
    write_weights(tmp_path, header, b"", length)
    assert "the weight file is corrupt: its header" in refusal(tmp_path).problem


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../a", "a/b", ".", "..", "", "\0", "\n", "x" * 5000]
)
def test_an_index_names_files_of_its_directory_only(tmp_path: Path, name: str) -> None:
    write_weights(tmp_path, {"a": A, "b": B})
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": SINGLE_FILE, "b": name}}))
    assert "which is no file beside it" in refusal(tmp_path).problem


@pytest.mark.parametrize(
    "text", ['{"weight_map":' + "[" * 100_000, "[]", '{"weight_map": {"\\ud800": "a"}}', "{", "\0"]
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    assert refusal(tmp_path).value == tmp_path / INDEX_FILE


def test_files_of_a_hubs_cache_are_links_to_another_directory(tmp_path: Path) -> None:
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    write_weights(tmp_path / "blobs", {"a": A, "b": B})
    link = tmp_path / "snapshot" / "model-00001-of-00001.safetensors"
    link.symlink_to(Path("..", "blobs", SINGLE_FILE))
    index = {"weight_map": dict.fromkeys("ab", link.name)}
    (tmp_path / "snapshot" / INDEX_FILE).write_text(json.dumps(index))
    assert read_weight_map(tmp_path / "snapshot").map_tensors().keys() == {"a", "b"}


ODD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ({"num_labels": 10**9}, "num_labels"),
    ({"hidden_size": -64}, "hidden_size"),
    ({"hidden_size": 2**70}, "hidden_size"),
    ({"hidden_size": float("nan")}, "hidden_size"),
    ({"hidden_size": [64]}, "hidden_size"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 2**64}, "num_key_value_heads"),
    ({"num_key_value_heads": -1}, "-"),
    ({"head_dim": 10**30}, "head_dim"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"model_type": {"a": 1}}, "model_type"),
    ({"model_type": None}, "model_type"),
    ({"architectures": 7}, "architectures"),
    ({"architectures": {"a": 1}}, "architectures"),
    ({"architectures": [{}]}, "architectures"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": []}}, "factor"),
]


@pytest.mark.parametrize(("changed", "field"), ODD_CONFIGS)
def test_an_odd_value_is_named_by_its_field(
    tmp_path: Path, changed: dict[str, Any], field: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    with pytest.raises(ChangeSomething) as refused:
        check_model(tmp_path)
        describe(read_config(tmp_path), 2)
    assert field in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


def test_a_config_may_have_as_many_layers_as_any_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": MOST_LAYERS}))
    assert len(describe(read_config(tmp_path), 2).layers) == MOST_LAYERS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": [' + "[]," * MOST_VALUES + "[]]}", "has more than"),
        ('{"a": "' + "x" * MAX_JSON_BYTES + '"}', "has more than"),
        ('{"a": 1' + "0" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_a_config_that_would_fill_memory_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ChangeSomething, match=problem) as refused:
        check_model(tmp_path)
    assert len(str(refused.value)) < 1000

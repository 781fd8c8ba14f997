"""The sizes and the identity of a model's directory."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvell.models.loading.stored_model import StoredModel, stored_model

CONFIG = SimpleNamespace(hidden_size=4, num_hidden_layers=3, num_attention_heads=2, vocab_size=9)
SIZES = {
    "block_count": 3,
    "embedding_length": 4,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "vocab_size": 9,
}


def write(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_facts_are_those_of_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, a=torch.zeros(3, 5), b=torch.zeros(7, dtype=torch.bfloat16))
    file = path / "model.safetensors"
    os.utime(file, (1000, 2000))
    stored = stored_model(path, CONFIG)
    assert (stored.size_bytes, stored.parameters) == (file.stat().st_size, 3 * 5 + 7)
    assert (stored.modified_unix_seconds, dict(stored.sizes)) == (2000, SIZES)


def test_the_digest_is_that_of_the_form_and_the_names(tmp_path: Path) -> None:
    first = stored_model(write(tmp_path / "a", a=torch.zeros(3)), CONFIG).digest
    same = stored_model(write(tmp_path / "b", a=torch.zeros(3)), CONFIG).digest
    other = stored_model(write(tmp_path / "c", a=torch.zeros(4)), CONFIG).digest
    (tmp_path / "b" / "config.json").write_text('{"hidden_size": 5}')
    changed = stored_model(tmp_path / "b", CONFIG).digest
    assert first == same
    assert len({first, other, changed}) == 3
    assert len(first) == 64


def test_shards_add_up(tmp_path: Path) -> None:
    places = {}
    for number in range(2):
        name = f"model-{number}.safetensors"
        save_file({f"t{number}": torch.zeros(5)}, tmp_path / name)
        places[f"t{number}"] = name
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert stored_model(tmp_path, CONFIG).parameters == 10


def test_packed_numbers_are_not_counted(tmp_path: Path) -> None:
    path = write(tmp_path, a=torch.zeros(3), packed=torch.zeros(8, dtype=torch.uint8))
    stored = stored_model(path, CONFIG)
    assert stored.parameters == 0 < stored.size_bytes


@pytest.mark.parametrize("damage", [None, b"", b"\x00" * 40])
def test_missing_and_damaged_files_have_no_facts(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    if damage is not None:
        (tmp_path / "model.safetensors").write_bytes(damage)
    assert stored_model(tmp_path, CONFIG) == StoredModel(sizes=SIZES)

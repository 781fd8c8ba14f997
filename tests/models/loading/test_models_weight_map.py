"""Which file each tensor of a directory is read from, by every reader of weights."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvell.attention.choice import choose_kernels
from kvell.device.shared_weights import SharedWeights
from kvell.engine.assembly import load_model
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.engine.unloaded import read_unloaded
from kvell.errors import ChangeSomething
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.weight_files import INDEX_FILE, SINGLE_FILE, read_weight_map
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import quiet
from tests.models.harness import prompt_ids, runner_over

CPU = torch.device("cpu")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def right(saved: Path) -> Tensors:
    return load_file(saved / SINGLE_FILE)


@pytest.fixture(scope="module")
def stale(right: Tensors) -> Tensors:
    return {name: tensor.flip(0).contiguous() for name, tensor in right.items()}


@pytest.fixture
def bare(saved: Path, tmp_path: Path) -> Path:
    """The model's directory without weights."""
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    (path / SINGLE_FILE).unlink()
    return path


def write(path: Path, name: str, tensors: Tensors) -> None:
    save_file(dict(tensors), path / name, metadata={"format": "pt"})


def assign(path: Path, files: Mapping[str, str]) -> None:
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": dict(files)}))


def halves(tensors: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    names = sorted(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}


def logits_of(model: PagedModel) -> torch.Tensor:
    return runner_over(model).step([("a", prompt_ids(20))]).clone()


def index_over_overlay(path: Path, right: Tensors, stale: Tensors) -> None:
    write(path, FIRST, right)
    write(path, SECOND, {**stale, "extra.weight": torch.zeros(2)})
    assign(path, {**dict.fromkeys(right, FIRST), "extra.weight": SECOND})


def index_over_both(path: Path, right: Tensors, stale: Tensors) -> None:
    first, second = halves(right)
    write(path, FIRST, {**stale, **first})
    write(path, SECOND, {**stale, **second})
    assign(path, {**dict.fromkeys(first, FIRST), **dict.fromkeys(second, SECOND)})


def index_next_to_a_single_file(path: Path, right: Tensors, stale: Tensors) -> None:
    write(path, SINGLE_FILE, stale)
    write(path, "w.safetensors", right)
    assign(path, dict.fromkeys(right, "w.safetensors"))


def files_that_are_not_the_models(path: Path, right: Tensors, stale: Tensors) -> None:
    write(path, SINGLE_FILE, right)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "nobody/nothing"}
    (path / "adapter_config.json").write_text(json.dumps(adapter))
    (path / "original").mkdir()
    others = (FIRST, SECOND, "consolidated.safetensors", "adapter_model.safetensors")
    for name in (*others, "zzz.safetensors", "original/model.safetensors"):
        write(path, name, stale)
    (path / "pytorch_model.bin").write_bytes(b"no pickle")


def config_that_names_another_file(path: Path, right: Tensors, stale: Tensors) -> None:
    write(path, SINGLE_FILE, right)
    write(path, "other.safetensors", stale)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(raw | {"transformers_weights": "other.safetensors"})
    )


def shards_without_an_index(path: Path, right: Tensors, stale: Tensors) -> None:
    for name, tensors in zip((FIRST, SECOND), halves(right), strict=True):
        write(path, name, tensors)
    write(path, "consolidated.safetensors", stale)


def shards_of_another_name(path: Path, right: Tensors, stale: Tensors) -> None:
    for number, tensors in enumerate(halves(right)):
        write(path, f"model.safetensors-{number}-of-2.safetensors", tensors)
    write(path, "consolidated.safetensors", stale)


def empty_index(path: Path, right: Tensors, stale: Tensors) -> None:
    write(path, SINGLE_FILE, right)
    write(path, "other.safetensors", stale)
    assign(path, {})


LAYOUTS = [
    index_over_overlay,
    index_over_both,
    index_next_to_a_single_file,
    files_that_are_not_the_models,
    config_that_names_another_file,
    shards_without_an_index,
    shards_of_another_name,
    empty_index,
]
HOW: list[dict[str, Any]] = [{}, {"fused": False}, {"quantization": "int4"}]


@pytest.mark.parametrize("lay", LAYOUTS)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_every_pass_reads_the_models_own_tensors(
    saved: Path,
    bare: Path,
    right: Tensors,
    stale: Tensors,
    lay: Callable[[Path, Tensors, Tensors], None],
    how: dict[str, Any],
) -> None:
    kernels = choose_kernels(CPU)
    if "quantization" in how and kernels.name != "native":
        pytest.skip("built without a compiler")
    lay(bare, right, stale)
    expected = logits_of(load_paged_model(saved, kernels, **how))
    assert torch.equal(logits_of(load_paged_model(bare, kernels, **how)), expected)


def test_a_draft_model_is_read_in_the_same_way(
    saved: Path, bare: Path, right: Tensors, stale: Tensors
) -> None:
    """A draft model has the loader of all others."""
    index_over_overlay(bare, right, stale)
    own, draft = (load_model(path, "float32", "cpu", quiet) for path in (saved, bare))
    assert torch.equal(logits_of(draft), logits_of(own))


def test_the_size_of_weights_is_that_of_the_models_tensors(
    bare: Path, right: Tensors, stale: Tensors
) -> None:
    index_over_both(bare, right, stale)
    write(bare, "consolidated.safetensors", stale)
    unloaded = read_unloaded("m", bare, EngineSettings(model="m"), is_first=True)
    assert unloaded.weight_file_bytes == sum(tensor.nbytes for tensor in right.values())


def test_shared_weights_are_those_of_one_index(
    bare: Path, right: Tensors, stale: Tensors, descriptor: int
) -> None:
    """Files stay as they are, and the index assigns other ones."""
    shared, kernels = SharedWeights(descriptor), choose_kernels(CPU)
    write(bare, FIRST, right)
    write(bare, SECOND, stale)
    made = []
    for number, name in enumerate((FIRST, SECOND)):
        assign(bare, dict.fromkeys(right, name))
        os.utime(bare / INDEX_FILE, ns=(number, number))
        expected = logits_of(load_paged_model(bare, kernels))
        made.append(logits_of(load_paged_model(bare, kernels, shared=shared)))
        assert torch.equal(made[-1], expected)
    assert not torch.equal(*made)


def refused(path: Path) -> str:
    with pytest.raises(ChangeSomething) as caught:
        read_weight_map(path)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def test_an_index_that_names_a_tensor_its_file_lacks(bare: Path, right: Tensors) -> None:
    first, second = halves(right)
    write(bare, FIRST, first)
    write(bare, SECOND, second)
    name = sorted(second)[0]
    assign(bare, {**dict.fromkeys(first, FIRST), **dict.fromkeys(second, SECOND), name: FIRST})
    assert f"its weight_map names {name!r} in {FIRST}, which lacks it" in refused(bare)


def test_an_index_that_names_a_missing_file(bare: Path, right: Tensors) -> None:
    write(bare, FIRST, right)
    write(bare, SINGLE_FILE, right)
    assign(bare, {**dict.fromkeys(right, FIRST), "extra.weight": SECOND})
    assert f"its weight file {SECOND} is missing" in refused(bare)


@pytest.mark.parametrize("fused", [True, False])
def test_a_tensor_that_the_index_leaves_out_is_not_the_models(
    bare: Path, right: Tensors, fused: bool
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write(bare, FIRST, right)
    assign(bare, dict.fromkeys(right.keys() - {name}, FIRST))
    with pytest.raises(ChangeSomething) as caught:
        load_paged_model(bare, choose_kernels(CPU), fused=fused)
    expected = f"lack 1 tensors, such as {name}: {FIRST} has it, but {INDEX_FILE} does not name it"
    assert expected in str(caught.value)


def test_a_tensor_of_two_shards_without_an_index(bare: Path, right: Tensors) -> None:
    first, second = halves(right)
    name = sorted(first)[0]
    write(bare, FIRST, first)
    write(bare, SECOND, {**second, name: first[name]})
    assert f"its tensor {name!r} is in {FIRST} and {SECOND}; fetch {INDEX_FILE}" in refused(bare)


def test_two_sets_of_shards_without_an_index(bare: Path, right: Tensors) -> None:
    write(bare, "model-00001-of-00001.safetensors", right)
    write(bare, FIRST, right)
    assert "model-…-of-00001 and model-…-of-00002" in refused(bare)


def test_a_missing_shard_without_an_index(bare: Path, right: Tensors) -> None:
    write(bare, SECOND, right)
    assert f"its weight file {FIRST} is missing" in refused(bare)


def test_a_damaged_file_that_is_not_the_models_is_not_opened(bare: Path, right: Tensors) -> None:
    write(bare, SINGLE_FILE, right)
    (bare / "consolidated.safetensors").write_bytes(b"\xff" * 20)
    assert read_weight_map(bare).files == (bare / SINGLE_FILE,)

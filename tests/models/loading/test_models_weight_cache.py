"""Models whose packed weights come from the files of an earlier start."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvell
from kvell.attention.choice import choose_kernels
from kvell.attention.native import NativeKernels
from kvell.cost.prices import DEFAULT_PRICES, InstancePrices
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_cache import WeightCache
from kvell.models.fused import packing
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.random_weights import write_random_model
from kvell.vocabulary import GIB
from tests.models.harness import tiny_config, tiny_module
from tests.models.loading.recorder import logits_of

pytest.importorskip("kvell.attention.native")

CPU = torch.device("cpu")
LOADS = """
import json, sys
from pathlib import Path
import torch
from kvell.attention.choice import choose_kernels
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_cache import WeightCache
from kvell.models.loading.loading import load_paged_model
from tests.models.loading.recorder import logits_of
print("here", flush=True)
sys.stdin.readline()
cache = WeightCache(Path(sys.argv[3]), 1 << 30, least_bytes=1)
shared = SharedWeights(int(sys.argv[1]))
kernels = choose_kernels(torch.device("cpu"))
model = load_paged_model(Path(sys.argv[2]), kernels, shared=shared, cache=cache)
cache.wait()
print(json.dumps([logits_of(model).double().sum().item(), cache.found_bytes]), flush=True)
"""


def new_cache(folder: Path) -> WeightCache:
    return WeightCache(folder, GIB, least_bytes=1)


def load(folder: Path, path: Path, kernels: Any = None, **how: Any) -> tuple[Any, int]:
    """Load a model with the cache; return its logits, and the bytes that were found there."""
    cache = new_cache(folder)
    logits = logits_of(load_paged_model(path, kernels or choose_kernels(CPU), cache=cache, **how))
    cache.wait()
    return logits, cache.found_bytes


@contextmanager
def no_packing() -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was packed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_pack", refuse)
        patch.setattr(packing, "packed_groups", refuse)
        yield


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "FalconH1ForCausalLM"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_second_load_packs_nothing_and_computes_the_same(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    """Files are float32 and untied, and served in bfloat16: the matrices are not in use as read."""
    path = tmp_path / "model"
    tiny_module(architecture).save_pretrained(path)
    how: Any = {"dtype": torch.bfloat16, "quantization": quantization}
    expected = logits_of(load_paged_model(path, choose_kernels(CPU), **how))
    made, found_bytes = load(tmp_path / "weights", path, **how)
    assert torch.equal(made, expected)
    assert found_bytes == 0
    with no_packing():
        made, found_bytes = load(tmp_path / "weights", path, **how)
    assert torch.equal(made, expected)
    assert found_bytes > 0


def test_a_second_load_reads_no_matrix(saved: Path, tmp_path: Path) -> None:
    """Matrices may be anything then; norms are read from the model's files."""
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    expected, _ = load(tmp_path / "weights", path)
    file = path / "model.safetensors"
    content, status = bytearray(file.read_bytes()), file.stat()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:header_bytes]).items():
        if name.startswith("model.layers") and len(entry["shape"]) > 1:
            start, stop = (header_bytes + at for at in entry["data_offsets"])
            content[start:stop] = bytes(stop - start)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    made, _ = load(tmp_path / "weights", path)
    assert torch.equal(made, expected)
    assert not torch.equal(logits_of(load_paged_model(path, choose_kernels(CPU))), expected)


def test_a_damaged_file_is_packed_again(saved: Path, tmp_path: Path) -> None:
    expected, _ = load(tmp_path, saved)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
    for is_found in (False, True):
        made, found_bytes = load(tmp_path, saved)
        assert torch.equal(made, expected)
        assert (found_bytes > 0) is is_found


def test_a_model_that_was_changed_is_not_found(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    load(tmp_path / "weights", path)
    write_random_model(path, tiny_config("LlamaForCausalLM"), seed=6)
    os.utime(path / "model.safetensors", ns=(1, 1))
    made, found_bytes = load(tmp_path / "weights", path)
    assert found_bytes == 0
    assert torch.equal(made, logits_of(load_paged_model(path, choose_kernels(CPU))))


def test_each_form_of_weights_is_a_file_of_its_own(saved: Path, tmp_path: Path) -> None:
    forms: list[dict[str, Any]] = [
        {},
        {"dtype": torch.bfloat16},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"kernels": NativeKernels(0, "portable")},
        {"overrides": '{"rms_norm_eps": 1e-3}'},
    ]
    for is_found in (False, True):
        for number, form in enumerate(forms):
            made, found_bytes = load(tmp_path, saved, **form)
            assert (found_bytes > 0) is is_found, form
            kernels = form.get("kernels") or choose_kernels(CPU)
            rest = {name: value for name, value in form.items() if name != "kernels"}
            assert torch.equal(made, logits_of(load_paged_model(saved, kernels, **rest)))
            if not is_found:
                assert len(list(tmp_path.iterdir())) == number + 1


def test_modules_and_random_weights_are_not_cached(
    saved: Path, tmp_path: Path, descriptor: int
) -> None:
    load(tmp_path, saved, is_dummy=True)
    shared = SharedWeights(descriptor)
    load(tmp_path, saved, dtype=torch.bfloat16, fused=False, shared=shared)
    assert [piece.what.split()[0] for piece in shared.entries()[0].pieces] == ["parameters"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_cached", [False, True])
def test_two_processes_have_the_weights_once_and_read_the_file_once(
    saved: Path, tmp_path: Path, descriptor: int, is_cached: bool
) -> None:
    expected = logits_of(load_paged_model(saved, choose_kernels(CPU))).double().sum().item()
    if is_cached:
        load(tmp_path, saved)
    command = [sys.executable, "-c", LOADS, str(descriptor), str(saved), str(tmp_path)]
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            text=True,
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    ends = [json.loads(child.communicate()[0]) for child in children]
    assert [total for total, _ in ends] == [expected, expected]
    assert sorted(found > 0 for _, found in ends) == [False, is_cached]
    assert len(SharedWeights(descriptor).entries()) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_an_llm_keeps_its_weights_below_the_cache_directory(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WeightCache] = []

    def small_too(folder: Path, most_bytes: int) -> WeightCache:
        made.append(WeightCache(folder, most_bytes, least_bytes=1))
        return made[-1]

    def start(**settings: Any) -> None:
        small: Any = {"kv_memory_bytes": 1 << 20, "max_model_len": 64}
        with kvell.LLM(str(saved), cache_dir=tmp_path, **small, **settings):
            for cache in made:
                cache.wait()

    monkeypatch.setattr("kvell.engine.opened.WeightCache", small_too)
    start(weight_cache=False)
    assert made == []
    start(weight_cache_size="1KiB")
    assert not (tmp_path / "weights").exists(), "larger than the bound"
    for _ in range(2):
        start()
    assert len(list((tmp_path / "weights").glob("*.weights"))) == 1
    assert [cache.found_bytes > 0 for cache in made] == [False, False, True]


def test_prices_are_measured_when_the_file_is_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes would slow the steps that a calibration times."""
    monkeypatch.setattr(
        "kvell.engine.opened.WeightCache",
        lambda folder, most_bytes: WeightCache(folder, most_bytes, least_bytes=1),
    )
    written: list[bool] = []

    def price(*_: object) -> InstancePrices:
        written.append(len(list((tmp_path / "weights").glob("*.weights"))) == 1)
        return DEFAULT_PRICES

    settings: Any = {"kv_memory_bytes": 1 << 20, "max_model_len": 64}
    kvell.LLM(str(saved), cache_dir=tmp_path, pricing=price, **settings).close()
    assert written == [True]

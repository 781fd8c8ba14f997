"""Models whose weights several processes have in memory once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvell
from kvell.attention.choice import choose_kernels
from kvell.device.shared_weights import MANIFEST_BYTES, SharedWeights
from kvell.device.weight_cache import WeightCache
from kvell.device.weight_memory import PrivateWeights
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.random_weights import write_random_model
from kvell.models.loading.shared_loading import memory_for
from kvell.vocabulary import MIB
from tests.device.locks import holder_of_the_lock
from tests.models.harness import tiny_config, tiny_module
from tests.models.loading.recorder import logits_of

pytest.importorskip("kvell.attention.native")

CPU = torch.device("cpu")
PROMPT = "The capital of France is"
SERVES = """
import json, sys
from pathlib import Path
import kvell
from kvell.models.fused import packing

def pack(*args, real=packing._pack):
    packed.append(None)
    real(*args)

packed, packing._pack = [], pack
descriptor, cache_dir = int(sys.argv[1]), Path(sys.argv[2])
llm = kvell.LLM(
    "smollm2",
    dtype="bfloat16",
    kv_memory_bytes=32 << 20,
    cache_dir=cache_dir,
    weights_fd=descriptor,
    weight_cache=False,
)
sampling = kvell.SamplingParams(temperature=0, max_tokens=8)
answer = llm.generate([{prompt!r}], sampling)[0]
print(json.dumps([answer.token_ids, len(packed)]), flush=True)
sys.stdin.read()
"""
PACKS = """
import sys
from pathlib import Path
import torch
from kvell.attention.choice import choose_kernels
from kvell.device.shared_weights import SharedWeights
from kvell.models.fused import packing
from kvell.models.loading.loading import load_paged_model

def pack(*args, once=[], real=packing._pack):
    real(*args)
    once.append(args)
    if len(once) == 2:
        print("packing", flush=True)
        sys.stdin.read()

packing._pack = pack
kernels, shared = choose_kernels(torch.device("cpu")), SharedWeights(int(sys.argv[1]))
load_paged_model(Path(sys.argv[2]), kernels, shared=shared)
"""


def child(code: str, descriptor: int, path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, str(descriptor), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
        text=True,
    )


def mappings(pid: int) -> list[dict[str, Any]]:
    """A process's mappings: their access, name and, in bytes, what smaps says of them."""
    found: list[dict[str, Any]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            found.append({"access": words[1], "name": " ".join(words[5:])})
        elif words[-1] == "kB":
            found[-1][words[0][:-1]] = int(words[1]) << 10
    return found


def largest_anonymous_bytes(pid: int) -> int:
    return max(int(one["Anonymous"]) for one in mappings(pid))


@pytest.mark.long
def test_two_processes_answer_as_one_and_have_the_weights_once(
    smollm2_path: Path, descriptor: int
) -> None:
    cache_dir = smollm2_path.parent
    alone = kvell.LLM("smollm2", dtype="bfloat16", kv_memory_bytes=32 * MIB, cache_dir=cache_dir)
    sampling = kvell.SamplingParams(temperature=0, max_tokens=8)
    expected = alone.generate([PROMPT], sampling)[0].token_ids
    weight_bytes = alone.contract.weights_bytes
    assert largest_anonymous_bytes(os.getpid()) > 0.9 * weight_bytes, "a copy of its own shows"
    code = SERVES.replace("{prompt!r}", repr(PROMPT))
    with child(code, descriptor, cache_dir) as first, child(code, descriptor, cache_dir) as second:
        told = []
        for one in (first, second):
            assert one.stdout is not None
            told.append(json.loads(one.stdout.readline()))
        assert [tokens for tokens, _ in told] == [expected, expected]
        assert sorted(packed > 0 for _, packed in told) == [False, True]
        for one in (first, second):
            seen = [each for each in mappings(one.pid) if "kvell-weights" in each["name"]]
            assert {each["access"] for each in seen} == {"r--s"}
            assert sum(each["Rss"] for each in seen) > 0.9 * weight_bytes
            assert sum(each["Shared_Clean"] + each["Shared_Dirty"] for each in seen) > 0
            assert sum(each["Private_Clean"] + each["Private_Dirty"] for each in seen) == 0
            assert largest_anonymous_bytes(one.pid) < 0.9 * weight_bytes
    assert len(SharedWeights(descriptor).entries()) == 1


def test_the_first_killed_while_it_packs_leaves_the_work_to_the_next(
    saved: Path, descriptor: int
) -> None:
    with child(PACKS, descriptor, saved) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "packing\n"
        assert holder_of_the_lock(descriptor) == first.pid
        assert os.fstat(descriptor).st_size > MANIFEST_BYTES
        first.kill()
        assert first.wait() == -signal.SIGKILL
    shared = SharedWeights(descriptor)
    assert shared.entries() == []
    expected = logits_of(load_paged_model(saved, choose_kernels(CPU)))
    for _ in range(2):
        made = load_paged_model(saved, choose_kernels(CPU), shared=shared)
        assert torch.equal(logits_of(made), expected)
        assert len(shared.entries()) == 1


@pytest.mark.parametrize(
    ("architecture", "fused", "pieces"),
    [
        ("LlamaForCausalLM", True, ["packed", "embeddings"]),
        ("FalconH1ForCausalLM", True, ["packed", "embeddings"]),
        ("LlamaForCausalLM", False, ["parameters"]),
        ("MixtralForCausalLM", True, ["parameters"]),
        ("DeepseekV3ForCausalLM", True, ["parameters"]),
    ],
)
def test_every_kind_of_pass_computes_the_same_over_shared_weights(
    tmp_path: Path, descriptor: int, architecture: str, fused: bool, pieces: list[str]
) -> None:
    """Files are float32 and untied, and served in bfloat16: no weight is used as it lies."""
    tiny_module(architecture).save_pretrained(tmp_path)
    shared = SharedWeights(descriptor)
    models = [
        load_paged_model(tmp_path, choose_kernels(CPU), torch.bfloat16, fused=fused, shared=each)
        for each in (None, shared, shared)
    ]
    expected, *others = [logits_of(model) for model in models]
    assert all(torch.equal(other, expected) for other in others)
    assert len({model.weight_bytes for model in models}) == 1
    (entry,) = shared.entries()
    assert [piece.what.split()[0] for piece in entry.pieces] == pieces


def test_parameters_in_their_files_mapping_stay_there(saved: Path, descriptor: int) -> None:
    shared = SharedWeights(descriptor)
    load_paged_model(saved, choose_kernels(CPU), fused=False, shared=shared)
    assert [entry.pieces for entry in shared.entries()] == [()]


def test_another_dtype_or_quantization_is_another_entry(saved: Path, descriptor: int) -> None:
    shared = SharedWeights(descriptor)
    wishes = [
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        (torch.float32, "int8"),
        (torch.float32, "int4"),
    ]
    for known in (False, True):
        for dtype, quantization in wishes:
            expected, made = (
                load_paged_model(
                    saved, choose_kernels(CPU), dtype, quantization=quantization, shared=each
                )
                for each in (None, shared)
            )
            assert torch.equal(logits_of(made), logits_of(expected)), (dtype, quantization, known)
    assert len({entry.key for entry in shared.entries()}) == len(wishes)
    assert len(shared.entries()) == len(wishes)


def test_a_model_that_was_changed_is_not_misread(
    saved: Path, tmp_path: Path, descriptor: int
) -> None:
    path, shared = Path(shutil.copytree(saved, tmp_path / "model")), SharedWeights(descriptor)
    load_paged_model(path, choose_kernels(CPU), shared=shared)
    write_random_model(path, tiny_config("LlamaForCausalLM"), seed=6)
    os.utime(path / "model.safetensors", ns=(1, 1))
    expected = logits_of(load_paged_model(path, choose_kernels(CPU)))
    made = load_paged_model(path, choose_kernels(CPU), shared=shared)
    assert torch.equal(logits_of(made), expected)
    assert len(shared.entries()) == 2


def test_several_models_lie_in_one_file(saved: Path, tmp_path: Path, descriptor: int) -> None:
    draft = write_random_model(tmp_path / "draft", tiny_config("LlamaForCausalLM"), seed=7)
    shared = SharedWeights(descriptor)
    for _ in range(2):
        for path in (saved, draft):
            expected = logits_of(load_paged_model(path, choose_kernels(CPU)))
            made = load_paged_model(path, choose_kernels(CPU), shared=shared)
            assert torch.equal(logits_of(made), expected)
    assert len(shared.entries()) == 2


def test_a_gpu_uses_neither_file(saved: Path, tmp_path: Path, descriptor: int) -> None:
    shared, device = SharedWeights(descriptor), torch.device("cuda")
    cache = WeightCache(tmp_path, MIB)
    form = (choose_kernels(CPU), torch.float32, device, True, "none")
    with memory_for(shared, cache, [saved / "config.json"], None, *form) as memory:
        assert isinstance(memory, PrivateWeights)
    assert shared.entries() == []

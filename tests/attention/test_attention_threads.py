"""How the compiled kernels cut their work over threads cannot be seen in the result."""

from dataclasses import replace

import pytest
import torch

from tests.attention.cases import Shape, attend, make_case, new_queries, store
from tests.attention.conftest import each_set

native = pytest.importorskip("kvell.attention.native", reason="the portable build has no threads")

SHAPES = {
    "one long decode": Shape(((3000, 1),), heads=9, kv_heads=3),
    "one decode with one section": Shape(((400, 1),), heads=9, kv_heads=3),
    "decodes and a prefill": Shape(((3000, 1), (1030, 1), (500, 120)), heads=4, kv_heads=1),
    "a prefill in wide or narrow tasks": Shape(((900, 700),), heads=6, kv_heads=2),
    "window": Shape(((3000, 1), (700, 50)), heads=4, kv_heads=2, window_tokens=600),
    "sinks and a short request": Shape(((2100, 1), (1, 1)), heads=4, kv_heads=2, sinks=True),
}


@pytest.mark.parametrize("instruction_set", each_set())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_threads_do_not_matter(shape: Shape, dtype: torch.dtype, instruction_set: str) -> None:
    case = make_case(replace(shape, dtype=dtype))
    alone = attend(native.NativeKernels(1, instruction_set), case)
    for threads in (2, 5):
        assert torch.equal(attend(native.NativeKernels(threads, instruction_set), case), alone)


def test_partials_do_not_depend_on_threads_either() -> None:
    case = make_case(Shape(((2500, 1), (90, 3)), sinks=True))
    results = []
    for threads in (1, 8):
        kernels = native.NativeKernels(threads)
        stored = store(kernels, case)
        partial = kernels.attend_partial(
            stored.layer, stored.batch, new_queries(case), case.shape.params
        )
        results.append(partial)
    one, eight = results
    assert torch.equal(one.output, eight.output)
    assert torch.equal(one.maximum, eight.maximum)
    assert torch.equal(one.denominator, eight.denominator)


def test_the_same_batch_object_may_be_used_for_many_layers() -> None:
    case = make_case(Shape(((100, 3),)))
    kernels = native.NativeKernels()
    stored = store(kernels, case)
    first, again = (
        kernels.attend(stored.layer, stored.batch, new_queries(case), case.shape.params)
        for _ in range(2)
    )
    assert torch.equal(first, again)
    for _ in range(20):  # more batches than are remembered
        attend(kernels, case)

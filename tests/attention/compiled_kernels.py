"""Compiles every Triton kernel to machine code for a GPU, which needs none: the interpreter
runs much that the compiler refuses.  A program of its own, since a process either interprets
kernels or compiles them.  Its argument is how their names begin."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu.copying import copy_runs
from kvell.attention.triton.long import attend_tiles
from kvell.attention.triton.short import attend_sections
from kvell.attention.triton.writing import write_quantised, write_rows

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "outputs": "bf16",
    "query": "bf16",
    "keys": "bf16",
    "values": "bf16",
    "new": "bf16",
    "pool": "bf16",
    "num_items": "i32",
    "items": "i32",
    "tiles": "i32",
    "counters": "i32",
    "page_ids": "i32",
    "offsets": "i32",
    "source": "i64",
    "target": "i64",
    "source_starts": "i64",
    "target_starts": "i64",
}
FLOATS = ("sinks", "scales", "key_scales", "value_scales", "maxima", "denominators")
PLAIN = {
    "HEADS": 4, "CAPPED": False, "HAS_SINKS": False, "PARTIAL": False, "QUANTISED": False,
    "LATENT": False, "PAGE_TOKENS": 16, "ROW": 16, "SIZE": 16, "SIZE_BLOCK": 16, "REST": 0,
    "REST_BLOCK": 16, "GROUP": 2, "PARTS": 1, "PART_HEADS": 2, "N": 16, "STAGES": 2,
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({}, {}),
    "int8, capped, as a partial": (
        {"QUANTISED": True, "ROW": 20, "CAPPED": True, "PARTIAL": True},
        {"keys": "i8", "values": "i8", "outputs": "fp32"},
    ),
    "fp8 latents, with sinks": (
        {"QUANTISED": True, "LATENT": True, "REST": 8, "ROW": 28, "HAS_SINKS": True},
        {"keys": "fp8e4nv", "values": "fp8e4nv"},
    ),
}


def compiled(kernel: Any, constants: dict[str, Any], pointers: dict[str, str]) -> int:
    """Bytes of a kernel's machine code."""
    kinds = POINTERS | pointers
    signature, values = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name in kinds:
            signature[name] = f"*{kinds[name]}"
        elif name in FLOATS or name.startswith("part_"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    source = ASTSource(kernel, signature, values)
    return len(triton.compile(source, target=TARGET, options={"num_warps": 4}).asm["cubin"])


def kernels() -> Iterator[tuple[str, Callable[[], int]]]:
    """Names of all kernels, and what gives their bytes."""
    for name, (changed, pointers) in VARIANTS.items():
        constants = PLAIN | changed
        short, long = constants | {"M": 16, "FOLD": 2}, constants | {"M": 64}
        yield f"sections, {name}", partial(compiled, attend_sections, short, pointers)
        yield f"tiles, {name}", partial(compiled, attend_tiles, long, pointers)
    row = {"KV_HEADS": 2, "PAGE_TOKENS": 16, "ROW": 8, "BLOCK": 16}
    yield "rows", partial(compiled, write_rows, row, {})
    for largest, whole, dtype in ((127, True, "i8"), (448, False, "fp8e4nv")):
        row = {"LARGEST": largest, "WHOLE": whole, "PAGE_TOKENS": 16, "SIZE": 8, "BLOCK": 8}
        name = f"quantised rows, {dtype}"
        yield name, partial(compiled, write_quantised, row, {"pool": dtype})
    yield "runs", partial(compiled, copy_runs, {"BLOCK": 1024}, {})


if __name__ == "__main__":
    chosen = {name: make() for name, make in kernels() if name.startswith(sys.argv[1])}
    sys.stdout.write(json.dumps(chosen))

"""Compiles kernels for a GPU as launches of real models do, and measures the machine code.

A program of its own, since a process either interprets kernels or compiles them.  Its arguments
are names of ``LAUNCHES``; it prints figures in JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu import copying
from bench.gpu.sizes import Heads
from bench.gpu.speed import one_layer
from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.triton import backend, launch
from kvell.attention.triton.backend import TritonKernels
from tests.attention.cases import starts_of

TARGET = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KINDS = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
SHAPES = (
    Heads("8B", 32, 8, 128),
    Heads("1B", 32, 8, 64),
    Heads("int8", 4, 2, 16, dtype=torch.int8),
    Heads("fp8 latents", 4, 2, 24, 16, dtype=torch.float8_e4m3fn),
)
"""Two sizes of Llama 3, and two small shapes whose kernels have the other branches."""

Launched = tuple[Sequence[Any], dict[str, Any]]


class Recorder:
    """A kernel that computes nothing and notes its arguments."""

    def __init__(self) -> None:
        self.launched: Launched = ((), {})

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def note(*values: Any, **named: Any) -> None:
            self.launched = (values, named)

        return note


def recorded(module: Any, name: str, launch_it: Callable[[], Any]) -> tuple[Any, Launched]:
    """A kernel of a module, and the arguments that a launch gives it."""
    kernel, recorder = getattr(module, name), Recorder()
    setattr(module, name, recorder)
    launch_it()
    setattr(module, name, kernel)
    return kernel, recorder.launched


def attended(heads: Heads, new_tokens: int) -> tuple[Any, Launched]:
    """The kernel and arguments of one request's attention in bfloat16, pages of 16 tokens.

    Over int8 it is capped and a partial; over latents it has sinks.
    """
    name = "attend_sections" if new_tokens == 1 else "attend_tiles"
    layer, batch, query = _step(heads, new_tokens)
    is_partial = layer.dtype == torch.int8
    sinks = torch.zeros(heads.heads) if layer.value_size else None
    params = AttendParams(0.1, softcap=3.0 * is_partial, sinks=sinks)
    kernels = TritonKernels()
    attend = kernels.attend_partial if is_partial else kernels.attend
    return recorded(launch, name, lambda: attend(layer, batch, query, params))


def written(heads: Heads, new_tokens: int) -> tuple[Any, Launched]:
    """The kernel and arguments that store keys and values."""
    layer, batch, query = _step(heads, new_tokens)
    new = query[:, : layer.kv_heads].contiguous()
    name = "write_quantised" if layer.quantised else "write_rows"
    value = None if layer.value_size else new
    return recorded(backend, name, lambda: TritonKernels().write_kv(layer, batch, new, value))


def copied() -> tuple[Any, Launched]:
    memory, starts = torch.zeros(256, dtype=torch.uint8), torch.tensor([0, 64])
    return recorded(
        copying, "copy_runs", lambda: copying.copy_pages(memory, starts, memory, starts, 64, 64)
    )


def _step(heads: Heads, tokens: int) -> tuple[LayerPages, GroupBatch, torch.Tensor]:
    layer = one_layer(heads)
    stride = 4 * layer.page_bytes
    pool = torch.zeros(16 * stride, dtype=torch.uint8)
    layer = replace(layer, pool=pool, page_stride_bytes=stride)
    pages = torch.arange(16, dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32)
    batch = GroupBatch(
        starts_of([tokens]), torch.tensor([256], dtype=torch.int32), starts_of([16]), pages,
        pages[:1], positions // 16, positions % 16,
    )  # fmt: skip
    query = torch.zeros(tokens, heads.heads, heads.head_size, dtype=torch.bfloat16)
    return layer, batch, query


LAUNCHES: dict[str, Callable[[], tuple[Any, Launched]]] = {
    f"{heads.name} {name}": partial(make, heads, tokens)
    for heads in SHAPES
    for name, make, tokens in (
        ("decode", attended, 1),
        ("prefill", attended, 200),
        ("write", written, 1),
    )
} | {"copy": copied}


def source_of(kernel: Any, launched: Launched) -> ASTSource:
    """What the compiler gets for a launch: multiples of 16 are known to be so."""
    values, named = launched
    given = dict(zip(kernel.arg_names, values, strict=False)) | named
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr:
            signature[name], constants[(place,)] = "constexpr", value
            continue
        address = value
        if isinstance(value, torch.Tensor):
            signature[name], address = f"*{KINDS[value.dtype]}", value.data_ptr()
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        is_int = not isinstance(address, float) and not parameter.do_not_specialize
        if is_int and address % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def figures(kernel: Any, launched: Launched) -> dict[str, int]:
    """Registers and stack of a thread, shared memory of a program, loads of 16 bytes."""
    options = {name: value for name, value in launched[1].items() if name in OPTIONS}
    compiled = triton.compile(source_of(kernel, launched), target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage, code = (_dump(flag, file.name) for flag in ("-res-usage", "-sass"))
    sizes = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": sizes["REG"],
        "stack_bytes": sizes["STACK"] + sizes["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"\bLDG(?:STS)?\.\S*128", code)),
    }


def _dump(flag: str, path: str) -> str:
    return subprocess.run([TOOL, flag, path], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: figures(*LAUNCHES[name]()) for name in sys.argv[1:]}))

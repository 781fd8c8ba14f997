"""The contract of attention on this machine's GPU: the tests' own cases, compiled.

Cases are dealt out to processes, because compiling the kernels of a case takes seconds
and running them next to nothing.  Every case compares with attention written out densely
in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from bench.gpu.copying import copy_pages
from bench.gpu.place import Place
from bench.gpu.report import Row, check
from bench.gpu.shapes import FEW, QUANTISED, RAGGED, SHAPES, tiny
from kvell.attention.interface import (
    AttendParams,
    AttentionKernels,
    GroupBatch,
    HostLengths,
    LayerPages,
    Partial,
)
from kvell.attention.merge import merge
from kvell.attention.quantised import quantise
from tests.attention.cases import (
    Shape,
    attend,
    dense_attention,
    make_case,
    new_queries,
    only,
    starts_of,
    store,
)

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
ENDS = (33, 100, 117, 300, 563, 700)
"""Where the chunks of a prompt end."""
ROUNDING = 1.6
"""Root-mean-square error of a 16-bit result, in roundings of the exact one."""


class ForCases:
    """Kernels of a device over CPU tensors, which the cases have."""

    name = "triton"

    def __init__(self, place: Place) -> None:
        self._kernels, self.device = place.kernels(), place.device

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Write keys and values on the device."""
        there = replace(layer, pool=layer.pool.to(self.device))
        moved = None if value is None else value.to(self.device)
        self._kernels.write_kv(there, self._moved(batch), key.to(self.device), moved)
        layer.pool.copy_(there.pool)

    def attend(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> torch.Tensor:
        """Compute attention on the device."""
        there, sunk = replace(layer, pool=layer.pool.to(self.device)), self._sinks(params)
        return self._kernels.attend(there, self._moved(batch), query.to(self.device), sunk).cpu()

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        """Compute partial attention on the device."""
        there, sunk = replace(layer, pool=layer.pool.to(self.device)), self._sinks(params)
        query = query.to(self.device)
        part = self._kernels.attend_partial(there, self._moved(batch), query, sunk)
        return Partial(part.output.cpu(), part.maximum.cpu(), part.denominator.cpu())

    def _moved(self, batch: GroupBatch) -> GroupBatch:
        lengths = {
            name: getattr(batch, name)
            for name in ("query_starts", "context_lens", "table_starts", "first_positions")
        }
        tensors = {
            name: each.to(self.device) for name, each in vars(batch).items() if name != "host"
        }
        return GroupBatch(**tensors, host=HostLengths(**lengths))

    def _sinks(self, params: AttendParams) -> AttendParams:
        sinks = params.sinks
        return params if sinks is None else replace(params, sinks=sinks.to(self.device))


@dataclass(frozen=True)
class Check:
    """A property that must hold; ``run`` returns a line that says how well, or raises."""

    name: str
    run: Callable[[ForCases], str]


def near(kernels: AttentionKernels, shape: Shape) -> str:
    """Check attention against its definition."""
    case = make_case(shape)
    output, exact = attend(kernels, case), dense_attention(case)
    tolerance = TOLERANCES[shape.dtype]
    error = (output.double() - exact).abs()
    assert output.dtype == shape.dtype, output.dtype
    assert (error <= tolerance + tolerance * exact.abs()).all(), f"off by {float(error.max())}"
    said = f"largest error {float(error.max()):.1e}"
    if shape.dtype != torch.float32:
        mean = float(error.square().mean().sqrt())
        rounding = float((exact.to(shape.dtype).double() - exact).square().mean().sqrt())
        assert mean <= ROUNDING * rounding, f"{mean:.1e}, a rounding is {rounding:.1e}"
        said += f", {mean:.1e} on average, a rounding is {rounding:.1e}"
    return said


def alone(kernels: AttentionKernels, shape: Shape) -> str:
    """Check that other requests and the placement of pages change nothing."""
    case = make_case(shape)
    together = torch.split(attend(kernels, case), [new for _, new in shape.requests])
    for i, (context, new) in enumerate(shape.requests):
        by_itself = attend(kernels, only(case, i, context, new), placement=i + 1)
        assert torch.equal(by_itself, together[i]), f"request {i} differs"
    return "equal to the last bit"


def chunked(kernels: AttentionKernels, shape: Shape, ends: Sequence[int] = ENDS) -> str:
    """Check that chunked prefill equals whole prefill, and decodes differ only by rounding."""
    length = ends[-1]
    case = make_case(replace(shape, requests=((length, length),)))
    whole = attend(kernels, case)
    for begin, end in zip([0, *ends], ends, strict=False):
        part = attend(kernels, only(case, 0, end, end - begin))
        assert torch.equal(part, whole[begin:end]), f"chunk up to {end} differs"
    decoded = [attend(kernels, only(case, 0, at + 1, 1))[0] for at in range(0, length, 50)]
    error = (torch.stack(decoded).double() - whole[::50].double()).abs().max()
    equal = sum(map(torch.equal, decoded, whole[::50]))
    assert error <= TOLERANCES[shape.dtype], f"decodes are off by {float(error)}"
    return f"chunks equal to the last bit; {equal} of {len(decoded)} decodes are, {error:.0e}"


def parts(kernels: AttentionKernels, shape: Shape) -> str:
    """Check that partials over pieces of the context merge to the whole."""
    case = make_case(shape)
    stored = store(kernels, case)
    batch, query = stored.batch, new_queries(case)
    found = []
    for first, last in ((0, 3), (3, 5), (5, 1 << 20)):
        begins, ends = batch.table_starts[:-1].tolist(), batch.table_starts[1:].tolist()
        spans = [(min(b + first, e), min(b + last, e)) for b, e in zip(begins, ends, strict=True)]
        skipped = [s - b for (s, _), b in zip(spans, begins, strict=True)]
        cut = replace(
            batch,
            table_starts=starts_of([e - s for s, e in spans]),
            page_ids=torch.cat([batch.page_ids[s:e] for s, e in spans]),
            first_positions=batch.first_positions + torch.tensor(skipped, dtype=torch.int32),
        )
        found.append(kernels.attend_partial(stored.layer, cut, query, shape.params))
    error = (merge(found, shape.params.sinks).double() - dense_attention(case)).abs().max()
    assert error <= TOLERANCES[shape.dtype], f"off by {float(error)}"
    return f"merged, largest error {float(error):.1e}"


def same_bytes(kernels: AttentionKernels, shape: Shape) -> str:
    """Check that quantised rows are stored as ``quantise`` makes them."""
    case = make_case(shape)
    stored = store(kernels, case)
    layer, page = stored.layer, int(stored.batch.page_ids[1])
    start = page * layer.page_stride_bytes + layer.layer_offset_bytes
    rows = layer.pool[start : start + layer.page_bytes].view(2, 2, 16, layer.row_bytes)
    off = 0
    for tensor, given in zip(rows, (case.keys[0], case.values[0]), strict=True):
        off += int((tensor != quantise(given[16:32], layer.dtype).transpose(0, 1)).sum())
    assert off == 0, f"{off} bytes differ"
    return "equal bytes"


def copies(kernels: ForCases, page_bytes: int) -> str:
    """Check pages gathered, scattered and moved by the copy kernel."""
    device = kernels.device
    pool = torch.randint(0, 256, (64 * page_bytes,), dtype=torch.uint8, device=device)
    pages = torch.randperm(64, device=device)[:20]
    buffer = torch.zeros(20 * page_bytes, dtype=torch.uint8, device=device)
    steps = torch.arange(20, device=device) * page_bytes
    copy_pages(buffer, steps, pool, pages * page_bytes, page_bytes, page_bytes)
    assert torch.equal(buffer.view(20, -1), pool.view(64, -1)[pages]), "gathered wrongly"
    other = torch.zeros_like(pool)
    copy_pages(other, pages * page_bytes, buffer, steps, page_bytes, page_bytes)
    expected = torch.zeros_like(pool).view(64, -1)
    expected[pages] = pool.view(64, -1)[pages]
    assert torch.equal(other.view(64, -1), expected), "scattered wrongly"
    return "equal bytes"


def checks() -> Iterator[Check]:
    """All checks."""
    for (name, shape), dtype in product(SHAPES.items(), PLAIN[:2]):
        yield _check(f"{name}, {dtype}", near, replace(shape, dtype=dtype))
    yield _check("float16", near, Shape(RAGGED, dtype=torch.float16))
    for (name, shape), dtype, pool in product(
        QUANTISED.items(), PLAIN[:2], (torch.int8, torch.float8_e4m3fn)
    ):
        stored = replace(shape, dtype=dtype, pool_dtype=pool)
        yield _check(f"{name}, {dtype} over {pool}", near, stored)
    for dtype, pool in ((PLAIN[0], PLAIN[1]), (PLAIN[1], PLAIN[0])):
        yield _check(f"{dtype} over {pool}", near, Shape(RAGGED, dtype=dtype, pool_dtype=pool))
    for dtype in PLAIN[:2]:
        shape = Shape(RAGGED, 8, 2, 128, dtype=dtype)
        yield _check(f"alone and together, {dtype}", alone, shape)
        yield _check(f"prefill chunks, {dtype}", chunked, shape)
        yield _check(f"partials, {dtype}", parts, replace(shape, sinks=True))
    windowed = Shape(RAGGED, 8, 2, 64, window_tokens=100)
    yield _check("prefill chunks under a window", chunked, windowed)
    yield _check("partials under a window", parts, windowed)
    for pool in (torch.int8, torch.float8_e4m3fn):
        shape = Shape(((40, 40),), 2, 2, 16, pool_dtype=pool)
        yield _check(f"stored bytes, {pool}", same_bytes, shape)
    for page_bytes in (4096, 1000, 6):
        yield Check(f"pages of {page_bytes} bytes", partial(copies, page_bytes=page_bytes))


def few_checks() -> Iterator[Check]:
    """Yield one check of each kind, over small shapes: what the interpreter does in seconds."""
    for name in FEW:
        yield _check(name, near, tiny(SHAPES[name]))
    yield _check("int8", near, replace(tiny(SHAPES["latents"]), pool_dtype=torch.int8))
    shape = tiny(Shape(RAGGED, 2, 1, 16))
    yield _check("alone and together", alone, shape)
    # Whole tiles: a row of numpy's products may round by its place among the others.
    yield _check("prefill chunks", partial(chunked, ends=(32, 64, 83)), shape)
    yield _check("partials", parts, replace(shape, requests=((90, 1), (20, 5)), sinks=True))
    yield _check("stored bytes", same_bytes, Shape(((40, 40),), 2, 2, 16, pool_dtype=torch.int8))
    yield Check("pages of 6 bytes", partial(copies, page_bytes=6))


def _check(name: str, run: Callable[[AttentionKernels, Shape], str], shape: Shape) -> Check:
    def ready(kernels: ForCases) -> str:
        return run(kernels, shape)

    return Check(name, ready)


def rows(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Yield a row for every ``of``-th check, from the ``part``-th on."""
    kernels = ForCases(Place.of(pretends))
    for each in list(few_checks() if pretends else checks())[part::of]:
        yield check(each.name, partial(each.run, kernels))

"""The tensors of a quantised checkpoint, by the names that its plain weights would have.

A matrix is several tensors of a file (``Packing``): its numbers, their scales, and perhaps zero
points and the groups of its inputs. All are checked by the headers, before anything is read::

    awq             qweight [in, out/8]       qzeros [groups, out/8]         scales [groups, out]
    gptq            qweight [in·bits/32, out] qzeros [groups, out·bits/32]   scales [groups, out]
                    g_idx [in], the group of each input
    pack-quantized  weight_packed [out, in·bits/32]  weight_scale [out, groups]
                    weight_zero_point [out·bits/32, groups]  weight_g_idx [in]
    int-quantized   weight int8 [out, in]     weight_scale, weight_zero_point [out, groups]
    float-quantized weight float8 [out, in]   weight_scale or weight_scale_inv [blocks, blocks]
    mxfp4           …_blocks [experts, out, groups, 16]  …_scales [experts, out, groups]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_MODEL_AGAIN
from kvell.models.config.stored_tensors import StoredTensor
from kvell.models.families.quantised_schemes import Packing, QuantisedScheme
from kvell.models.loading.weight_files import SHOWN_NAME, WeightMap

if TYPE_CHECKING:
    import torch

    from kvell.models.fused.grouped import BlockWeight

Shape = tuple[int, ...]
WORD_BITS = 32
HELPERS = frozenset(
    "qzeros scales g_idx weight_scale weight_scale_inv weight_zero_point weight_shape weight_g_idx "
    "input_scale input_zero_point output_scale output_zero_point activation_scale".split()
)
"""Tensors next to a matrix's numbers, by the last part of their names."""
MAIN = {
    Packing.AWQ: ("qweight", frozenset({"I32"})),
    Packing.GPTQ: ("qweight", frozenset({"I32"})),
    Packing.PACKED: ("weight_packed", frozenset({"I32"})),
    Packing.INTEGERS: ("weight", frozenset({"I8"})),
    Packing.FLOATS: ("weight", frozenset({"F8_E4M3", "F8_E5M2"})),
    Packing.EXPERTS: ("_blocks", frozenset({"U8"})),
}
"""The ending and the dtype of the tensor that has a matrix's numbers."""
UNREAD = frozenset({"I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})
"""Dtypes of tensors that no plain weight has."""
SCALES = frozenset({"F16", "BF16", "F32", "F8_E8M0", "U8"})


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix's tensors in a file.

    :param shape: the shape of the plain weight.
    :param parts: names of its tensors: ``numbers``, ``scales``, ``zeros``, ``groups``.
    """

    name: str
    shape: Shape
    parts: Mapping[str, str]


@dataclass(frozen=True)
class QuantisedWeights(WeightMap):
    """Weights of which some are stored in a quantised scheme, and are brought as blocks.

    :ivar raw: the files' tensors as they are.
    """

    raw: WeightMap = field(kw_only=True)
    scheme: QuantisedScheme = field(kw_only=True)
    matrices: Mapping[str, QuantisedMatrix] = field(kw_only=True)

    @property
    @override
    def size_bytes(self) -> int:
        return self.raw.size_bytes

    @override
    def stored_as(self, form: str) -> str:
        return self.scheme.read_into(form)

    @override
    def blocks(self) -> "dict[str, BlockWeight]":
        return dict(self._blocks)

    @override
    def map_tensors(self) -> "dict[str, torch.Tensor]":
        import torch

        plain = super().map_tensors()
        made = {name: torch.zeros(1).expand(m.shape) for name, m in self.matrices.items()}
        return plain | made

    @cached_property
    def _blocks(self) -> "dict[str, BlockWeight]":
        from kvell.models.loading.quantised_blocks import blocks_of_matrix

        tensors = self.raw.map_tensors()
        return {
            name: blocks_of_matrix(
                name,
                matrix.shape,
                self.scheme,
                {part: tensors[stored] for part, stored in matrix.parts.items()},
            )
            for name, matrix in self.matrices.items()
        }


def quantised_weights(raw: WeightMap, scheme: QuantisedScheme) -> QuantisedWeights:
    """Group a checkpoint's tensors by their matrices.

    :raises ChangeSomething: naming a matrix whose tensors are missing or do not fit each other, or
        a tensor that the scheme does not have.
    """
    ending, dtypes = MAIN[scheme.packing]
    matrices = {}
    for name, tensor in raw.stored.items():
        if name.endswith(ending) and tensor.dtype in dtypes:
            matrix = _matrix(raw, scheme, name.removesuffix(ending), tensor)
            matrices[matrix.name] = matrix
    if not matrices:
        raise _fault(raw, f"has no tensor of its quantisation ({scheme.title})")
    used = {name for matrix in matrices.values() for name in matrix.parts.values()}
    owners = {name.removesuffix("weight") for name in matrices}
    plain = {
        name: file
        for name, file in raw.file_of.items()
        if name not in used and not _helps(name, owners)
    }
    for name in plain:
        if raw.stored[name].dtype in UNREAD:
            dtype = raw.stored[name].dtype
            problem = f"{dtype}, which {scheme.title} does not have there"
            raise _fault(raw, f"its tensor {name[:SHOWN_NAME]} is {problem}")
    stored = {name: raw.stored[name] for name in plain}
    for name, matrix in matrices.items():
        numbers = raw.stored[matrix.parts["numbers"]]
        stored[name] = StoredTensor(name, "F32", matrix.shape, numbers.start, numbers.stop)
    kept = vars(raw) | {"file_of": plain, "stored": stored}
    return QuantisedWeights(**kept, raw=raw, scheme=scheme, matrices=matrices)


def _helps(name: str, owners: set[str]) -> bool:
    module, _, last = name.rpartition(".")
    return last in HELPERS and f"{module}." in owners


def _matrix(
    raw: WeightMap, scheme: QuantisedScheme, module: str, numbers: StoredTensor
) -> QuantisedMatrix:
    """Return a matrix whose tensors are all there, and of shapes that fit each other.

    :raises ChangeSomething: if they are not.
    """
    is_expert = scheme.packing is Packing.EXPERTS
    name = module if is_expert else f"{module}weight"
    if len(numbers.shape) != (4 if is_expert else 2) or 0 in numbers.shape:
        raise _fault(raw, f"its tensor {numbers.name[:SHOWN_NAME]} has the shape {numbers.shape}")
    shape, expected, needed = _parts(scheme, numbers.shape)
    is_whole = scheme.packing not in (Packing.FLOATS, Packing.EXPERTS)
    if is_whole and scheme.columns and shape[-1] % scheme.columns:
        shown = f"{name[:SHOWN_NAME]} has {shape[-1]} inputs"
        raise _fault(raw, f"{shown}, which groups of {scheme.columns} do not divide")
    parts = {"numbers": numbers.name}
    for part, (endings, fits) in expected.items():
        stored = next((raw.stored[module + e] for e in endings if module + e in raw.stored), None)
        if stored is None and part in needed:
            raise _fault(raw, f"its weights lack {module[:SHOWN_NAME]}{endings[0]}")
        if stored is None:
            continue
        if _squeeze(stored.shape) != _squeeze(fits):
            problem = f"has the shape {stored.shape} instead of {fits}"
            raise _fault(raw, f"its tensor {stored.name[:SHOWN_NAME]} {problem}")
        if part == "scales" and stored.dtype not in SCALES:
            raise _fault(raw, f"its scales {stored.name[:SHOWN_NAME]} are {stored.dtype}")
        parts[part] = stored.name
    return QuantisedMatrix(name, shape, parts)


def _parts(
    scheme: QuantisedScheme, stored: Shape
) -> tuple[Shape, Mapping[str, tuple[Sequence[str], Shape]], set[str]]:
    """Return a matrix's shape, its other tensors with their names and shapes, and those it needs.

    :param stored: the shape of the tensor that has its numbers.
    """
    each = WORD_BITS // scheme.bits
    needed = {"scales", *(["zeros"] if scheme.has_zeros else [])}
    if scheme.packing is Packing.EXPERTS:
        experts, out, groups, half = stored
        width = 2 * half * groups
        return (experts, width, out), {"scales": (["_scales"], (experts, out, groups))}, needed
    if scheme.packing is Packing.AWQ:
        width, words = stored
        groups = _count(width, scheme.columns)
        scales = (["scales"], (groups, words * each))
        zeros = (["qzeros"], (groups, words))
        return (words * each, width), {"scales": scales, "zeros": zeros}, needed
    if scheme.packing is Packing.GPTQ:
        words, out = stored
        groups = _count(words * each, scheme.columns)
        return (
            (out, words * each),
            {
                "scales": (["scales"], (groups, out)),
                "zeros": (["qzeros"], (groups, math.ceil(out / each))),
                "groups": (["g_idx"], (words * each,)),
            },
            needed,
        )
    out, width = stored
    if scheme.packing is Packing.PACKED:
        width *= each
    grid = (_count(out, scheme.rows), _count(width, scheme.columns))
    parts: dict[str, tuple[Sequence[str], Shape]] = {
        "scales": (["weight_scale_inv", "weight_scale"], grid)
    }
    if scheme.packing is Packing.PACKED:
        parts["zeros"] = (["weight_zero_point"], (math.ceil(out / each), grid[1]))
        parts["groups"] = (["weight_g_idx"], (width,))
    if scheme.packing is Packing.INTEGERS:
        parts["zeros"] = (["weight_zero_point"], grid)
    return (out, width), parts, needed


def _count(size: int, shared: int) -> int:
    return math.ceil(size / shared) if shared else 1


def _squeeze(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _fault(raw: WeightMap, problem: str) -> ChangeSomething:
    return ChangeSomething("model", raw.path, problem, FETCH_MODEL_AGAIN)

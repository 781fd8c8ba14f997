"""Quantised checkpoints of transformers: which are read, from their configs alone.

::

    awq                 4 bits in groups, gemm                           → int4
    gptq                4 or 8 bits in groups (gptq, gptq_v2)            → int4, int8 if reordered
    compressed-tensors  pack-quantized 4 or 8 bits                       → int4 or int8
                        int-quantized, float-quantized, naive-quantized  → int8
    fp8                 blocks or whole matrices                         → int8
    mxfp4               experts                                          → the served dtype

Weights alone are read so. A scheme's quantised activations are computed in the served dtype, which
is nearer to the model that was quantised.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import MALFORMED, REPAIR_CONFIG, read_by_library

Fields = Mapping[str, Any]
USE_PLAIN = "use the same model in bfloat16 or float32"
KERNEL_GROUP = 32
"""Inputs for which the kernels keep a scale; larger groups repeat theirs."""


class Packing(StrEnum):
    """The way in which files have the numbers of a matrix; by the tensors that have them."""

    AWQ = "awq"
    GPTQ = "gptq"
    PACKED = "pack-quantized"
    INTEGERS = "int-quantized"
    FLOATS = "float-quantized"
    EXPERTS = "mxfp4"


@dataclass(frozen=True)
class QuantisedScheme:
    """The quantisation of a checkpoint that is read.

    :param method: the config's name of the quantiser.
    :param rows: outputs that share a scale; 0: all.
    :param columns: inputs that share a scale; 0: all.
    :param has_zeros: whether each matrix must have zero points.
    :param zero_offset: added to zero points that files store.
    :param is_reordered: whether groups are of inputs in another order.
    :param has_activations: whether the quantiser wants activations quantised too.
    """

    method: str
    packing: Packing
    bits: int
    rows: int = 1
    columns: int = 0
    has_zeros: bool = False
    zero_offset: int = 0
    is_reordered: bool = False
    has_activations: bool = False

    @property
    def kernel_form(self) -> str:
        """The form in which compiled code reads it; "" for the served dtype."""
        if self.packing is Packing.EXPERTS:
            return ""
        is_packed = self.packing in (Packing.AWQ, Packing.GPTQ, Packing.PACKED)
        fits = self.columns % KERNEL_GROUP == 0 and not self.is_reordered
        return "int4" if is_packed and self.bits == 4 and fits else "int8"

    @property
    def title(self) -> str:
        """The quantiser and the size of its groups, as users know them."""
        kind = "" if self.packing in (self.method, Packing.FLOATS) else f" {self.packing}"
        shared = f"groups of {self.columns}" if self.columns else "rows"
        if self.rows != 1:
            shared = f"blocks of {self.rows} x {self.columns}" if self.rows else "whole matrices"
        return f"{self.method}{kind}, {self.bits} bits in {shared}"

    def read_into(self, form: str) -> str:
        """Return a line for users about weights that are read into a form or dtype."""
        line = f"{self.title}; read into {form}"
        return f"{line}; activations are not quantised" if self.has_activations else line


def scheme_of(config: object, name: object) -> QuantisedScheme | None:
    """Return the quantisation of a model's weights; None if they are plain.

    :param name: the model, for errors.
    :raises ChangeSomething: if weights of that quantisation are not read.
    """
    quantised = getattr(config, "quantization_config", None)
    if not quantised:
        return None
    fields = quantised if isinstance(quantised, Mapping) else vars(quantised)
    with read_by_library("quantization_config", MALFORMED, REPAIR_CONFIG):
        return _scheme(fields, name)


def without_quantiser(config: Any) -> Any:
    """Return a config of the same model with plain weights."""
    if not getattr(config, "quantization_config", None):
        return config
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain


def _scheme(fields: Fields, name: object) -> QuantisedScheme:
    method = str(fields.get("quant_method") or "unknown")
    match method:
        case "awq":
            return _awq(fields, name)
        case "gptq":
            return _gptq(fields, name)
        case "compressed-tensors":
            return _compressed_tensors(fields, name)
        case "fp8":
            rows, columns = fields.get("weight_block_size") or (0, 0)
            return QuantisedScheme(
                method, Packing.FLOATS, 8, int(rows), int(columns), has_activations=True
            )
        case "mxfp4":
            return QuantisedScheme(method, Packing.EXPERTS, 4, columns=32)
    raise _refusal(name, method, "it needs kernels that read them")


def _awq(fields: Fields, name: object) -> QuantisedScheme:
    version = str(fields.get("version") or fields.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refusal(name, "awq", f"version {version[:40]} is not read, only gemm")
    bits = _bits(fields.get("bits") or fields.get("w_bit") or 4, (4,), name, "awq")
    group = fields.get("group_size") or fields.get("q_group_size") or 128
    return QuantisedScheme(
        "awq", Packing.AWQ, bits, columns=_group(group, name, "awq"), has_zeros=True
    )


def _gptq(fields: Fields, name: object) -> QuantisedScheme:
    version = str(fields.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2") or fields.get("is_marlin_format"):
        raise _refusal(name, "gptq", "only the formats gptq and gptq_v2 are read")
    if fields.get("dynamic"):
        raise _refusal(name, "gptq", "its modules have several quantisations (dynamic)")
    return QuantisedScheme(
        "gptq",
        Packing.GPTQ,
        _bits(fields.get("bits") or 4, (4, 8), name, "gptq"),
        columns=_group(fields.get("group_size") or 128, name, "gptq"),
        has_zeros=True,
        zero_offset=int(version == "gptq"),
        is_reordered=bool(fields.get("desc_act")),
    )


def _compressed_tensors(fields: Fields, name: object) -> QuantisedScheme:
    method = "compressed-tensors"
    if fields.get("kv_cache_scheme"):
        raise _refusal(name, method, "keys and values have a scheme of their own (kv_cache_scheme)")
    if fields.get("transform_config"):
        raise _refusal(name, method, "activations are to be rotated (transform_config)")
    if (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refusal(name, method, "they are sparse as well (sparsity_config)")
    groups = [*(fields.get("config_groups") or {}).values()]
    weights = [group.get("weights") for group in groups]
    if not weights or not all(weights):
        raise _refusal(name, method, "it quantises activations alone")
    first = weights[0]
    facts = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure")
    if any(other.get(fact) != first.get(fact) for other in weights for fact in facts):
        raise _refusal(name, method, "its modules have several quantisations (config_groups)")
    rows, columns = _sharing(first, name)
    packing = _packing(str(fields.get("format") or ""), first, name)
    bits = (4, 8) if packing is Packing.PACKED else (8,)
    return QuantisedScheme(
        method,
        packing,
        _bits(first.get("num_bits") or 8, bits, name, method),
        rows,
        columns,
        has_zeros=not first.get("symmetric", True) and packing is not Packing.FLOATS,
        is_reordered=first.get("actorder") in ("group", "dynamic", True),
        has_activations=any(group.get("input_activations") for group in groups),
    )


def _packing(form: str, weights: Fields, name: object) -> Packing:
    is_float = weights.get("type", "int") == "float"
    if form == "pack-quantized" and not is_float:
        return Packing.PACKED
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        return Packing.FLOATS if is_float else Packing.INTEGERS
    raise _refusal(name, "compressed-tensors", f"format {form[:40] or 'none'} is not read")


def _sharing(weights: Fields, name: object) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale; 0 for all."""
    group = int(weights.get("group_size") or 0)
    strategy = str(weights.get("strategy") or ("group" if group > 0 else "tensor"))
    match strategy:
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group":
            return 1, _group(group, name, "compressed-tensors")
        case "block":
            rows, columns = weights.get("block_structure") or (128, 128)
            return int(rows), int(columns)
    raise _refusal(name, "compressed-tensors", f"scales by {strategy[:40]} are not read")


def _bits(given: object, read: tuple[int, ...], name: object, method: str) -> int:
    bits = int(str(given))
    if bits not in read:
        raise _refusal(
            name, method, f"{bits} bits are not read; only {' or '.join(map(str, read))}"
        )
    return bits


def _group(given: object, name: object, method: str) -> int:
    """Return the inputs of a group; 0 if all of a row share a scale."""
    size = int(str(given))
    if size == 0 or size < -1:
        raise _refusal(name, method, f"groups of {size} inputs are not read")
    return max(size, 0)


def _refusal(name: object, method: str, need: str) -> ChangeSomething:
    problem = f"its weights are quantised ({method}): {need}"
    return ChangeSomething("model", name, problem, USE_PLAIN)

"""Bytes of the weights of a quantised checkpoint, as its files store them.

A quantiser replaces the matrices of linears and experts by small numbers with scales: one for a
group of an input's numbers, a block, a row or the whole matrix. Embeddings, heads, norms, biases,
routers, convolutions and the modules that the config excludes stay as they are. Sources: the
quantisers of transformers, and the formats of compressed-tensors and AutoGPTQ.

::

    mxfp4               4 bits, 8 for each 32 numbers; experts alone
    fp8                 8 bits, 32 for each block, or for the matrix
    awq, gptq           4 bits, 16 and the zero point for each group; gptq: 32 for each input
    bitsandbytes        8 bits, 32 for each row; or 4 bits, 32 (nested: 8) for each 64 numbers
    compressed-tensors  as its first group says
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvell.models.config.json_files import MALFORMED, REPAIR_CONFIG, read_by_library

Shape = tuple[int, ...]
Fields = Mapping[str, Any]
KEPT = re.compile(
    r"(^|\.)(embed\w*|wte|lm_head|router|gate|shared_expert_gate|\w*norm\w*|A_log)(\.|$)"
)
"""Modules that no quantiser replaces by default; ``gate`` is a router."""
EXPERT = re.compile(r"(^|\.)experts(\.|$)")
METHODS = frozenset(
    {"mxfp4", "fp8", "fbgemm_fp8", "awq", "gptq", "bitsandbytes", "compressed-tensors"}
)


@dataclass(frozen=True)
class StoredForm:
    """The form of a quantised matrix.

    :param scale_bits: bits of a scale with its zero point.
    :param rows: outputs that share a scale; 0: all.
    :param columns: inputs that share a scale; 0: all.
    :param input_bits: further bits for each input.
    :param kept: patterns of modules that stay as they are, besides ``KEPT``.
    :param experts_only: whether only experts are quantised.
    """

    bits: int
    scale_bits: float
    rows: int = 1
    columns: int = 0
    input_bits: int = 0
    kept: tuple[str, ...] = ()
    experts_only: bool = False

    def bytes_of(self, shape: Shape) -> int:
        *stack, out, width = shape
        scales = math.ceil(out / (self.rows or out)) * math.ceil(width / (self.columns or width))
        bits = out * width * self.bits + scales * self.scale_bits + width * self.input_bits
        return math.prod(stack) * math.ceil(bits / 8)

    def replaces(self, name: str, shape: Shape) -> bool:
        is_expert = EXPERT.search(name) is not None
        if len(shape) != 2 and not (len(shape) == 3 and is_expert):
            return False
        if name.endswith("bias") or KEPT.search(name) or (self.experts_only and not is_expert):
            return False
        module = name.removesuffix(".weight")
        return not any(_matches(pattern, module) for pattern in self.kept)


def quantised_bytes(
    tensors: Mapping[str, Shape], quantised: object, element_bytes: int
) -> int | None:
    """Return the bytes of a checkpoint's tensors; None if the quantiser is not known.

    :param tensors: shapes by the names of transformers' modules.
    :param quantised: the config's ``quantization_config``.
    :param element_bytes: size of an element of tensors that are not quantised.
    :raises ChangeSomething: if a field of it is malformed.
    """
    fields = quantised if isinstance(quantised, Mapping) else vars(quantised)
    with read_by_library("quantization_config", MALFORMED, REPAIR_CONFIG):
        form = stored_form(fields)
        if form is None:
            return None
        return sum(
            form.bytes_of(shape) if form.replaces(name, shape) else math.prod(shape) * element_bytes
            for name, shape in tensors.items()
        )


def stored_form(fields: Fields) -> StoredForm | None:
    """Return the form of a quantiser's matrices; None if the quantiser is not known."""
    method = str(fields.get("quant_method") or _bitsandbytes(fields))
    skipped = fields.get("modules_to_not_convert") or fields.get("llm_int8_skip_modules") or ()
    kept = tuple(str(name) for name in (*skipped, *(fields.get("ignore") or ())))
    bits, group = int(fields.get("bits") or 4), int(fields.get("group_size") or 128)
    columns = group if group > 0 else 0
    match method:
        case "mxfp4":
            return StoredForm(4, 8, columns=32, kept=kept, experts_only=True)
        case "fp8" | "fbgemm_fp8":
            block = fields.get("weight_block_size") or ((1, 0) if "fbgemm" in method else (0, 0))
            return StoredForm(8, 32, int(block[0]), int(block[1]), kept=kept)
        case "awq":
            return StoredForm(bits, 16 + bits, columns=columns, kept=kept)
        case "gptq":
            return StoredForm(bits, 16 + bits, columns=columns, input_bits=32, kept=kept)
        case "bitsandbytes" if fields.get("load_in_4bit"):
            scale_bits = 8 + 32 / 256 if fields.get("bnb_4bit_use_double_quant") else 32
            return StoredForm(4, scale_bits, columns=64, kept=kept)
        case "bitsandbytes":
            return StoredForm(8, 32, kept=kept)
        case "compressed-tensors":
            return _compressed(fields, kept)
    return None


def _bitsandbytes(fields: Fields) -> str:
    is_old = fields.get("load_in_4bit") or fields.get("load_in_8bit")
    return "bitsandbytes" if is_old else "unknown"


def _compressed(fields: Fields, kept: tuple[str, ...]) -> StoredForm | None:
    groups = [*(fields.get("config_groups") or {}).values()]
    weights = next((group["weights"] for group in groups if group.get("weights")), None)
    if weights is None:
        return None
    bits = int(weights.get("num_bits") or 8)
    structure = weights.get("block_structure") or (128, 128)
    columns = int(weights.get("group_size") or 0)
    is_symmetric = weights.get("symmetric", True)
    scale_bits = 16 + (0 if is_symmetric else bits)
    if weights.get("type") == "float" and bits == 4:
        scale_bits = 8
        columns = columns or 16
    match str(weights.get("strategy") or ("group" if columns > 0 else "tensor")):
        case "tensor":
            return StoredForm(bits, scale_bits, rows=0, kept=kept)
        case "channel":
            return StoredForm(bits, scale_bits, kept=kept)
        case "block":
            return StoredForm(bits, scale_bits, int(structure[0]), int(structure[1]), kept=kept)
    return StoredForm(bits, scale_bits, columns=max(columns, 0), kept=kept)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    parts = re.escape(pattern).replace(r"\*", "[^.]+")
    return re.search(rf"(^|\.){parts}(\.|$)", module) is not None

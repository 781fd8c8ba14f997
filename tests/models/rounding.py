"""Numbers that are hard to round to bfloat16, and what they become."""

import torch

DENORMALS_ARE_ZEROS = frozenset({"avx512", "amx"})
"""Instruction sets whose own conversion to bfloat16 takes denormal numbers for zeros."""

_NOT_NUMBERS = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FC12345, 0xFFFFFFFF, 0x7FFFFFFF]
_INFINITE = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000]
_TIES = [0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x7F7E8000, 0x00808000]
_NEAR_TIES = [0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x3F818001, 0x7F7F7FFF, 0x4049_0FDB]
_DENORMAL = [0x00000001, 0x80007FFF, 0x00008000, 0x00018000, 0x000116C2, 0x807F8000, 0x007F7FFF]

HARD_BITS = [*_NOT_NUMBERS, *_INFINITE, *_TIES, *_NEAR_TIES, *_DENORMAL, 0x3F800000]


def hard_numbers() -> torch.Tensor:
    """Float32 [32]: no numbers, infinities, ties, their neighbours, denormal numbers."""
    return torch.tensor(HARD_BITS).to(torch.int32).view(torch.float32)


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    """The bits of float32 or bfloat16 numbers, as integers without a sign."""
    wide = numbers.element_size() == 4
    kept = numbers.view(torch.int32 if wide else torch.int16).to(torch.int64)
    return kept & (0xFFFFFFFF if wide else 0xFFFF)


def rounded_bits(numbers: torch.Tensor, denormals_are_zeros: bool = False) -> torch.Tensor:
    """Bits of bfloat16: torch's, but a NaN keeps its sign and payload, and becomes quiet."""
    bits = bits_of(numbers)
    expected = bits_of(numbers.bfloat16())
    if denormals_are_zeros:
        expected[bits & 0x7F800000 == 0] &= 0x8000
    return torch.where(numbers.isnan(), bits >> 16 | 0x40, expected)

"""What is timed: shapes of heads, batches and contexts; tiny ones where a CPU pretends."""

from dataclasses import dataclass, replace

import torch

from kvell.attention.quantised import is_quantised

Batch = tuple[int, int]
"""Requests, and tokens of each one's context."""


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    heads: int
    kv_heads: int
    head_size: int
    value_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = 16
    window_tokens: int = 0

    def tiny(self) -> "Heads":
        """Return the shape with few heads of few numbers, for the interpreter."""
        return replace(
            self,
            heads=2,
            kv_heads=min(2, self.kv_heads),
            head_size=24 if self.value_size else 16,
            value_size=16 if self.value_size else 0,
            dtype=self.dtype if is_quantised(self.dtype) else torch.float32,
        )


@dataclass(frozen=True)
class Sizes:
    """Sizes of all timings.

    :param cache_bytes: what keys and values are spread over, so that no cache holds what is
        read next.
    :param chunk_contexts: context and new tokens of pieces of prompts, for the first shape.
    :param copied: bytes of a page, and pages that are copied.
    :param engine: requests, prompt and output tokens of whole steps.
    :param chunk_counts: chunks that are mapped at once.
    :param alias_writes: writes to a chunk that another of its addresses must see.
    """

    decodes: tuple[tuple[Heads, tuple[Batch, ...]], ...]
    prefills: tuple[tuple[Heads, tuple[Batch, ...]], ...]
    chunk_contexts: tuple[tuple[int, int], ...]
    cache_bytes: int
    copied: tuple[int, int]
    engine: tuple[int, int, int]
    memory_bytes: int
    product: int
    chunk_counts: tuple[int, ...]
    alias_writes: int


LLAMA = Heads("llama 32/8 x 128", 32, 8, 128)
DECODES = (
    LLAMA,
    Heads("qwen 28/4 x 128", 28, 4, 128),
    Heads("gemma 8/4 x 256", 8, 4, 256),
    Heads("gpt-oss 64/8 x 64", 64, 8, 64),
    Heads("latent 128/1 x 576", 128, 1, 576, 512),
    Heads("llama, pages of 32", 32, 8, 128, page_tokens=32),
    Heads("llama, fp8", 32, 8, 128, dtype=torch.float8_e4m3fn),
    Heads("llama, int8", 32, 8, 128, dtype=torch.int8),
)
PREFILLS = (LLAMA, Heads("gemma 8/4 x 256", 8, 4, 256), Heads("gpt-oss 64/8 x 64", 64, 8, 64))
LLAMA_BATCHES = ((1, 2048), (1, 32_768), (8, 2048), (8, 8192), (32, 2048), (32, 8192), (64, 4096))
DECODE_BATCHES = ((8, 2048), (32, 4096))
PREFILL_BATCHES = ((1, 2048), (4, 4096), (1, 16_384))

FULL = Sizes(
    tuple((heads, LLAMA_BATCHES if heads is LLAMA else DECODE_BATCHES) for heads in DECODES),
    tuple((heads, PREFILL_BATCHES) for heads in PREFILLS),
    tuple((16_384, new) for new in (17, 256, 2048)),
    cache_bytes=1 << 30,
    copied=(64 << 10, 32_768),
    engine=(32, 1024, 48),
    memory_bytes=4 << 30,
    product=8192,
    chunk_counts=(1, 16, 256),
    alias_writes=1000,
)
TINY = Sizes(
    tuple((heads.tiny(), ((1, 16),)) for heads in DECODES),
    tuple((heads.tiny(), ((1, 24),)) for heads in PREFILLS[:1]),
    ((20, 18),),
    cache_bytes=0,
    copied=(256, 8),
    engine=(2, 20, 3),
    memory_bytes=1 << 20,
    product=64,
    chunk_counts=(1, 2),
    alias_writes=4,
)


def sizes_of(pretends: bool) -> Sizes:
    """Return the sizes for a GPU, or for a CPU that pretends to be one."""
    return TINY if pretends else FULL

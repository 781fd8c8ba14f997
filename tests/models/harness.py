"""Tiny models of every family, and a hand-made page table to run them over."""

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

from kvell.attention.interface import GroupBatch
from kvell.attention.portable import PortableKernels
from kvell.models.description import ModelDescription, describe
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.models.random_weights import random_module
from kvell.models.segments import LayerCallbacks
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout

PAGE_TOKENS = 4
SMALL: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW: dict[str, Any] = {"sliding_window": 9}
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = WINDOW | {"layer_types": [SLIDING, FULL, SLIDING]}
FIVE_TO_ONE: dict[str, Any] = WINDOW | {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING] * 5 + [FULL],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ArceeForCausalLM": ("ArceeConfig", {}),
    "Exaone4ForCausalLM": ("Exaone4Config", MIXED),
    "Gemma2ForCausalLM": ("Gemma2Config", MIXED | {"query_pre_attn_scalar": 24}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", FIVE_TO_ONE | {"query_pre_attn_scalar": 24}),
    "GemmaForCausalLM": ("GemmaConfig", {}),
    "GptOssForCausalLM": ("GptOssConfig", MIXED | EXPERTS),
    "GraniteForCausalLM": ("GraniteConfig", {"attention_multiplier": 0.3}),
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "MinistralForCausalLM": ("MinistralConfig", MIXED),
    "MistralForCausalLM": ("MistralConfig", WINDOW),
    "MixtralForCausalLM": ("MixtralConfig", EXPERTS | {"sliding_window": None}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "Olmo3ForCausalLM": ("Olmo3Config", MIXED),
    "OlmoForCausalLM": ("OlmoConfig", {}),
    "Phi3ForCausalLM": ("Phi3Config", WINDOW),
    "Qwen2ForCausalLM": ("Qwen2Config", MIXED | {"use_sliding_window": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", {}),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "SeedOssForCausalLM": ("SeedOssConfig", {}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", {}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", WINDOW),
}
"""Each architecture that is listed as exact, with a tiny config of it."""


def tiny_config(architecture: str, **changes: Any) -> Any:
    class_name, particulars = FAMILIES[architecture]
    fields = SMALL | particulars | changes
    return getattr(transformers, class_name)(**fields, architectures=[architecture])


@cache
def tiny_module(architecture: str) -> Any:
    """Random weights whose outputs vary; transformers' own eager attention."""
    module = random_module(tiny_config(architecture), seed=3)
    module.set_attn_implementation("eager")  # sdpa would leave out Gemma 2's soft cap
    return module


def small_layout(description: ModelDescription, large_pages: int = 12) -> Layout:
    """Groups by kind, window and size; every page is padded by one layer's bytes."""
    members: dict[tuple[GroupKind, int, int], list[LayerSpec]] = {}
    for layer in description.layers:
        members.setdefault((layer.kind, layer.window_tokens, layer.token_bytes), []).append(layer)
    strides = [
        PAGE_TOKENS * token_bytes * (len(layers) + 1)
        for (_, _, token_bytes), layers in members.items()
    ]
    large = math.lcm(*strides) * 4
    groups = tuple(
        GroupSpec(
            name=f"{kind}-{window}",
            kind=kind,
            layers=tuple(layer.index for layer in layers),
            layer_token_bytes=token_bytes,
            page_tokens=PAGE_TOKENS,
            page_stride_bytes=stride,
            pages_per_large=large // stride,
            window_tokens=window,
        )
        for stride, ((kind, window, token_bytes), layers) in zip(
            strides, members.items(), strict=True
        )
    )
    return Layout(groups, large, large_pages * len(groups))


@dataclass
class Request:
    """Pages of one request per group, in order of position, and how far it is computed."""

    pages: list[list[int]]
    computed: int = 0


@dataclass
class PagedRunner:
    """Hands out shuffled pages and builds the batch of each step by hand.

    Page 0 of the pool and whatever leaves a window hold NaN, so reading what must
    not be read shows.
    """

    model: PagedModel
    layout: Layout
    pool: torch.Tensor
    free: list[list[int]]
    requests: dict[str, Request] = field(default_factory=dict)
    callbacks: LayerCallbacks | None = None

    def step(self, work: Sequence[tuple[str, Sequence[int]]]) -> torch.Tensor:
        """Run new tokens of some requests; logits [all new tokens, vocab], in order."""
        for name, tokens in work:
            self._grow(name, len(tokens))
        positions = [
            self.requests[name].computed + index for name, t in work for index in range(len(t))
        ]
        flat = [token for _, tokens in work for token in tokens]
        batch = ForwardBatch(
            torch.tensor(flat),
            torch.tensor(positions),
            tuple(self._group(index, work) for index in range(len(self.layout.groups))),
            torch.arange(len(flat)),
        )
        logits = self.model.forward(batch, self.callbacks)
        for name, tokens in work:
            self.requests[name].computed += len(tokens)
        return logits

    def page_bytes(self, group: int, page: int) -> torch.Tensor:
        stride = self.layout.groups[group].page_stride_bytes
        return self.pool[page * stride : (page + 1) * stride]

    def _grow(self, name: str, tokens: int) -> None:
        empty: list[list[int]] = [[] for _ in self.layout.groups]
        request = self.requests.setdefault(name, Request(empty))
        needed = -(-(request.computed + tokens) // PAGE_TOKENS)
        for group, pages in enumerate(request.pages):
            while len(pages) < needed:
                pages.append(self.free[group].pop())

    def _group(self, index: int, work: Sequence[tuple[str, Sequence[int]]]) -> GroupBatch:
        spec = self.layout.groups[index]
        query_starts, lens, table_starts, firsts = [0], [], [0], []
        ids: list[int] = []
        write_ids: list[int] = []
        write_rows: list[int] = []
        for name, tokens in work:
            request = self.requests[name]
            pages, end = request.pages[index], request.computed + len(tokens)
            first = self._first_page(spec, request, index)
            ids += pages[first:]
            query_starts.append(query_starts[-1] + len(tokens))
            table_starts.append(len(ids))
            lens.append(end)
            firsts.append(first)
            write_ids += [pages[p // PAGE_TOKENS] for p in range(request.computed, end)]
            write_rows += [p % PAGE_TOKENS for p in range(request.computed, end)]
        lists = (query_starts, lens, table_starts, ids, firsts, write_ids, write_rows)
        return GroupBatch(*(torch.tensor(entry, dtype=torch.int32) for entry in lists))

    def _first_page(self, spec: GroupSpec, request: Request, group: int) -> int:
        """First page that a window still reads; those before are wiped and left out."""
        if not spec.window_tokens:
            return 0
        first = max(0, request.computed - spec.window_tokens + 1) // PAGE_TOKENS
        for page in request.pages[group][:first]:
            self.page_bytes(group, page).fill_(0xFF)
        return first


def runner_over(model: PagedModel, shuffle_seed: int = 0) -> PagedRunner:
    """A runner with a pool of its own: groups take large pages in turn, page 0 of each is bait."""
    layout = small_layout(model.description)
    pool = torch.full((layout.pool_bytes,), 0xFF, dtype=torch.uint8)
    model.attach(layout, pool)
    free = [
        [
            large * group.pages_per_large + page
            for large in range(index, layout.num_large_pages, len(layout.groups))
            for page in range(group.pages_per_large)
        ][1:]
        for index, group in enumerate(layout.groups)
    ]
    for pages in free:
        random.Random(shuffle_seed).shuffle(pages)
    return PagedRunner(model, layout, pool, free)


def paged(module: Any) -> PagedModel:
    """A paged model over a copy of the module, so that the original stays the oracle."""
    description = describe(module.config, module.dtype.itemsize)
    return PagedModel(copy.deepcopy(module), description, PortableKernels())


def prompt_ids(length: int, seed: int = 0, vocab: int = 509) -> list[int]:
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(3, vocab) for _ in range(length)]


def oracle_logits(module: Any, ids: Sequence[int]) -> torch.Tensor:
    """transformers' own logits at every position, float32 [tokens, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0].float()


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit, which is what exact means for float32."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()

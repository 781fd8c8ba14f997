"""Tiny models of every family, and a hand-made page table to run them over."""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import transformers

from kvell.attention.interface import GroupBatch
from kvell.attention.portable import PortableKernels
from kvell.attention.states import StateBatch
from kvell.memory import policy_of
from kvell.models.config.description import ModelDescription, describe
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout
from tests.models.attention_variants import VARIANTS

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

MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", FULL, "conv"]}
FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "BambaForCausalLM": ("BambaConfig", MAMBA2 | {"attn_layer_indices": [1]}),
    "FalconH1ForCausalLM": (
        "FalconH1Config",
        MAMBA2
        | {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "ssm_in_multiplier": 0.7,
            "ssm_out_multiplier": 1.3,
            "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 1.1],
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "key_multiplier": 0.6,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.9, 1.1],
        },
    ),
    "FalconMambaForCausalLM": ("FalconMambaConfig", {"state_size": 8, "intermediate_size": 96}),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        MAMBA2
        | EXPERTS
        | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 32},
    ),
    "JambaForCausalLM": (
        "JambaConfig",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 6,
        },
    ),
    "KimiLinearForCausalLM": (
        "KimiLinearConfig",
        EXPERTS
        | {
            "layer_types": LINEAR["layer_types"],
            "linear_head_dim": 16,
            "linear_num_heads": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
        },
    ),
    "Lfm2ForCausalLM": ("Lfm2Config", CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", CONVOLUTIONS | FEW_EXPERTS | {"num_dense_layers": 1}),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    ),
    "MambaForCausalLM": ("MambaConfig", {"state_size": 8, "intermediate_size": 96}),
    "MiniMaxForCausalLM": (
        "MiniMaxConfig",
        EXPERTS | {"layer_types": LINEAR["layer_types"], "block_size": 16},
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
        },
    ),
    "OlmoHybridForCausalLM": ("OlmoHybridConfig", LINEAR | {"linear_allow_neg_eigval": True}),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        LINEAR | FEW_EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", LINEAR),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3_5MoeTextConfig",
        LINEAR | FEW_EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    "Zamba2ForCausalLM": (
        "Zamba2Config",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "head_dim": 24,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "n_mamba_heads": 6,
            "mamba_headdim": 16,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "chunk_size": 16,
        },
    ),
}
"""Families with states beside attention; odd numbers of heads and groups on purpose."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **STATES,
    **VARIANTS,
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
    for layer in (layer for layer in description.layers if layer.kv_of is None):
        members.setdefault((layer.kind, layer.window_tokens, layer.token_bytes), []).append(layer)
    strides = [
        2 * token_bytes
        if kind is GroupKind.STATE
        else PAGE_TOKENS * token_bytes * (len(layers) + 1)
        for (kind, _, token_bytes), layers in members.items()
    ]
    large = math.lcm(*strides) * 4
    groups = tuple(
        GroupSpec(
            name=f"{kind}-{window}",
            kind=kind,
            layers=tuple(layer.index for layer in layers),
            layer_token_bytes=token_bytes,
            page_tokens=1 if kind is GroupKind.STATE else PAGE_TOKENS,
            page_stride_bytes=stride,
            pages_per_large=large // stride,
            window_tokens=window,
            layers_per_page=1 if kind is GroupKind.STATE else 0,
        )
        for stride, ((kind, window, token_bytes), layers) in zip(
            strides, members.items(), strict=True
        )
    )
    return Layout(groups, large, large_pages * len(groups))


@dataclass
class Request:
    """Pages of one request per group, in order of position, and how far it is computed.

    Of a state group, the pages of the running state, one for each slice.
    """

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
    kept: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)

    def step(
        self,
        work: Sequence[tuple[str, Sequence[int]]],
        cuts: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Run new tokens of some requests; logits [all new tokens, vocab], in order.

        :param cuts: lengths at which the states of a request are kept.
        """
        logits = self.model.forward(self.batch(work, cuts), self.callbacks)
        for name, tokens in work:
            self.requests[name].computed += len(tokens)
        return logits

    def batch(
        self,
        work: Sequence[tuple[str, Sequence[int]]],
        cuts: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> ForwardBatch:
        """The batch of such a step, with pages for its tokens."""
        for name, tokens in work:
            self._grow(name, len(tokens))
        positions = [
            self.requests[name].computed + index for name, t in work for index in range(len(t))
        ]
        flat = [token for _, tokens in work for token in tokens]
        return ForwardBatch(
            torch.tensor(flat),
            torch.tensor(positions),
            tuple(self._group(index, work, cuts) for index in range(len(self.layout.groups))),
            torch.arange(len(flat)),
        )

    def page_bytes(self, group: int, page: int) -> torch.Tensor:
        stride = self.layout.groups[group].page_stride_bytes
        return self.pool[page * stride : (page + 1) * stride]

    def _grow(self, name: str, tokens: int) -> None:
        empty: list[list[int]] = [[] for _ in self.layout.groups]
        request = self.requests.setdefault(name, Request(empty))
        needed = -(-(request.computed + tokens) // PAGE_TOKENS)
        for group, pages in enumerate(request.pages):
            spec = self.layout.groups[group]
            while len(pages) < (spec.slices if spec.kind is GroupKind.STATE else needed):
                pages.append(self.free[group].pop())

    def resume(self, name: str, source: str, length: int) -> None:
        """A request that starts with another's pages, its states those kept after ``length``."""
        self.requests[name] = Request([[] for _ in self.layout.groups], length)
        for group, spec in enumerate(self.layout.groups):
            if spec.kind is GroupKind.STATE:
                old = self.kept[source, length][group]
            else:
                old = self.requests[source].pages[group][: -(-length // PAGE_TOKENS)]
            for page in old:
                new = self.free[group].pop()
                self.page_bytes(group, new).copy_(self.page_bytes(group, page))
                self.requests[name].pages[group].append(new)

    def _group(
        self,
        index: int,
        work: Sequence[tuple[str, Sequence[int]]],
        cuts: Mapping[str, Sequence[int]],
    ) -> GroupBatch | StateBatch:
        if self.layout.groups[index].kind is GroupKind.STATE:
            return self._states(index, work, cuts)
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

    def _states(
        self,
        index: int,
        work: Sequence[tuple[str, Sequence[int]]],
        cuts: Mapping[str, Sequence[int]],
    ) -> StateBatch:
        slices = self.layout.groups[index].slices
        requests = [self.requests[name] for name, _ in work]
        starts = [request.computed for request in requests]
        kept = [
            (place, name, end) for place, (name, _) in enumerate(work) for end in cuts.get(name, ())
        ]
        pages = [[self.free[index].pop() for _ in range(slices)] for _ in kept]
        for (_, name, end), states in zip(kept, pages, strict=True):
            self.kept.setdefault((name, end), [[] for _ in self.layout.groups])[index] = states
        lists = (
            [0, *accumulate(len(tokens) for _, tokens in work)],
            starts,
            [request.pages[index] for request in requests],
            [place for place, _, _ in kept],
            [end - starts[place] for place, _, end in kept],
        )
        tensors = [torch.tensor(entry, dtype=torch.int32) for entry in (*lists, pages)]
        tensors[-1] = tensors[-1].view(-1, slices)
        return StateBatch(*tensors)

    def _first_page(self, spec: GroupSpec, request: Request, group: int) -> int:
        """First page that a window still reads; those before are wiped and left out."""
        if not spec.window_tokens:
            return 0
        first = policy_of(spec).active_start(request.computed) // PAGE_TOKENS
        for page in request.pages[group][:first]:
            self.page_bytes(group, page).fill_(0xFF)
        return first


def runner_over(model: PagedModel, shuffle_seed: int = 0, large_pages: int = 12) -> PagedRunner:
    """A runner with a pool of its own: groups take large pages in turn, page 0 of each is bait."""
    layout = small_layout(model.description, large_pages)
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

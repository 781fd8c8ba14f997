"""vLLM's own KVCacheManager for one shape and memory size, behind the loop's interface.

Everything that decides is vLLM's: specs per layer, groups and page sizes
(``get_kv_cache_configs``), block hashes, look-up, allocation, and for states the rule that cuts
a prefill at page boundaries (``Scheduler._mamba_block_aligned_split``).  Written for vLLM 0.32;
only its environment can import this file.
"""

import logging
import os
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from bench.managers.peer.job import PeerJob, PeerLayer, kinds_of  # noqa: E402
from bench.managers.peer.requests import Row  # noqa: E402
from bench.managers.peer.waste import Held, PeerGroup, Table, held  # noqa: E402

KERNEL_PAGE_TOKENS = 16
LAYOUT = "LBNHC"
"""vLLM's name for the order of a page's dimensions; nothing here depends on it."""


def page_tokens_of(job: PeerJob) -> int:
    """vLLM grows the attention page until it is as large as a state."""
    state_bytes = max(layer.state_bytes for layer in job.layers)
    if not state_bytes:
        return job.block_tokens
    token_bytes = max(layer.token_bytes for layer in job.layers)
    unit = max(job.block_tokens, KERNEL_PAGE_TOKENS)
    return unit * -(-state_bytes // (unit * token_bytes))


def spec_of(layer: PeerLayer, page_tokens: int, page_bytes: int, job: PeerJob) -> Any:
    """vLLM's description of one layer."""
    if layer.kind == "state":
        return MambaSpec(
            block_size=page_tokens,
            shapes=((layer.state_bytes // torch.bfloat16.itemsize,),),
            dtypes=(torch.bfloat16,),
            page_size_padded=page_bytes,
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int(job.checkpoints_in_chunks),
            prefill_checkpoint_alignment=1 if job.checkpoints_in_chunks else None,
        )
    sizes = {
        "block_size": page_tokens,
        "num_kv_heads": layer.kv_heads,
        "head_size": layer.head_size,
        "dtype": torch.bfloat16,
    }
    if layer.kind == "sliding":
        return SlidingWindowSpec(**sizes, sliding_window=layer.window_tokens)
    if layer.kind == "chunked":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=layer.window_tokens)
    return FullAttentionSpec(**sizes)


class Timed:
    """Adds up the time inside calls."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its time kept."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.nanoseconds += time.perf_counter_ns() - start

        return timed


class VllmPool:
    """The manager that :class:`bench.managers.peer.loop.Loop` drives, with the time of its calls.

    :param longest: tokens of the trace's longest request.
    :raises ValueError: in vLLM's words, if it refuses the shape or the memory.
    """

    def __init__(self, job: PeerJob, longest: int) -> None:
        self.job, self.manager_time, self.hash_time = job, Timed(), Timed()
        self.page_tokens = page_tokens_of(job)
        self._has_states = any(layer.kind == "state" for layer in job.layers)
        config = self._config(longest)
        self.kv_config, self.page_bytes = self._plan(config)
        scheduler_tokens, self.hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(
            self.kv_config, config
        )
        self._manager = KVCacheManager(
            self.kv_config,
            max_model_len=longest,
            scheduler_block_size=scheduler_tokens,
            hash_block_size=self.hash_tokens,
            max_in_flight_tokens=config.max_in_flight_tokens,
            enable_caching=True,
        )
        self._split = self._splitter(config, scheduler_tokens)
        kv_cache_utils.init_none_hash(sha256)
        hasher = kv_cache_utils.get_request_block_hasher(self.hash_tokens, sha256)
        self._hasher = self.hash_time(hasher)
        self._held_for_copies: Any = None
        self._bind()

    # -------------------------------------------------------------------- set-up

    def _config(self, longest: int) -> Any:
        config = VllmConfig(
            cache_config=CacheConfig(
                block_size=self.page_tokens,
                enable_prefix_caching=True,
                prefix_cache_retention_interval=self.job.retention_tokens,
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=self.job.max_batched_tokens,
                max_num_seqs=self.job.max_running,
                max_model_len=longest,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=False,
            ),
        )
        config.model_config = types.SimpleNamespace(
            max_model_len=longest,
            original_max_model_len=longest,
            is_hybrid=self._has_states,
            use_mla=False,
        )
        cache = config.cache_config
        cache.block_size, cache.kv_cache_layout = self.page_tokens, LAYOUT
        if self._has_states:
            cache.mamba_cache_mode, cache.mamba_block_size = "align", self.page_tokens
        register_all_kvcache_specs(config)
        return config

    def _plan(self, config: Any) -> tuple[Any, int]:
        token_bytes = max(layer.token_bytes for layer in self.job.layers)
        specs = {
            name: spec_of(layer, self.page_tokens, self.page_tokens * token_bytes, self.job)
            for name, layer in kinds_of(self.job.layers)
        }
        worker = kv_cache_utils.get_kv_cache_configs(config, [specs], [self.job.memory_bytes])
        plan = kv_cache_utils.generate_scheduler_kv_cache_config(worker)
        largest = max(tensor.size for tensor in plan.kv_cache_tensors)
        return plan, largest // plan.num_blocks

    def _splitter(self, config: Any, scheduler_tokens: int) -> Any:
        """``Scheduler._mamba_block_aligned_split``, bound to what it reads."""
        groups = [group.kv_cache_spec for group in self.kv_config.kv_cache_groups]
        states = [spec for spec in groups if isinstance(spec, MambaSpec)]
        if not states:
            return None
        partial_hits = self._manager.coordinator.enable_partial_hash_hits
        scheduler = types.SimpleNamespace(
            cache_config=config.cache_config,
            scheduler_config=config.scheduler_config,
            block_size=scheduler_tokens,
            hash_block_size=self.hash_tokens,
            use_eagle_block_drop=False,
            max_num_scheduled_tokens=self.job.max_batched_tokens,
            mamba_partial_cache_hit=self.hash_tokens < scheduler_tokens and partial_hits,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=all(
                spec.num_prefill_checkpoint_blocks for spec in states
            ),
            mamba_prefill_checkpoint_alignment=states[0].prefill_checkpoint_alignment,
        )
        return types.MethodType(Scheduler._mamba_block_aligned_split, scheduler)

    def _bind(self) -> None:
        """Time what the manager does, and nothing around it."""
        manager, timed = self._manager, self.manager_time
        self._new_step_starts = timed(manager.new_step_starts)
        self._get_computed_blocks = timed(manager.get_computed_blocks)
        self._allocate_slots = timed(manager.allocate_slots)
        self._free = timed(manager.free)
        self._drains = [
            timed(manager.take_boundary_state_offloads),
            timed(manager.take_new_block_ids),
        ]
        self._take_copies = timed(manager.take_kv_cache_block_copies)
        self._free_blocks = timed(manager.block_pool.free_blocks)

    # ---------------------------------------------------------------- the loop's

    def make(self, index: int, row: Row, tokens: list[int]) -> Any:
        """Make the request of a row."""
        return Request(
            str(index),
            tokens,
            SamplingParams(max_tokens=row.output_tokens),
            None,
            arrival_time=row.arrival_s,
            block_hasher=self._hasher,
        )

    def begin_step(self) -> None:
        """Tell the manager."""
        self._new_step_starts()

    def look_up(self, request: Any) -> tuple[Any, int]:
        """The longest prefix that every group has."""
        found, hit_tokens, boundary = self._get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        return found, hit_tokens

    def chunk(self, request: Any, tokens: int, hit_tokens: int) -> int:
        """Cut at a page boundary where there are states."""
        if self._split is None:
            return tokens
        cut: int = self._split(request, tokens, hit_tokens)
        return cut

    def admit(self, request: Any, tokens: int, found: Any, hit_tokens: int, alone: bool) -> bool:
        """Pages for a first chunk, if the whole prompt fits."""
        blocks = self._allocate_slots(
            request,
            tokens,
            num_new_computed_tokens=hit_tokens,
            new_computed_blocks=found,
            full_sequence_must_fit=True,
            has_scheduled_reqs=not alone,
        )
        if blocks is None:
            return False
        request.status = RequestStatus.RUNNING
        return True

    def grow(self, request: Any, tokens: int) -> bool:
        """Pages for the next tokens."""
        return self._allocate_slots(request, tokens) is not None

    def release(self, request: Any, preempted: bool) -> None:
        """Give the pages back."""
        self._free(request)
        if preempted:
            request.status = RequestStatus.PREEMPTED

    def end_plan(self) -> None:
        """Drain what a worker would be told."""
        _, self._held_for_copies = self._take_copies()
        for drain in self._drains:
            drain()

    def end_step(self) -> None:
        """Copies have been made: what they read is free."""
        if self._held_for_copies:
            self._free_blocks(self._held_for_copies)

    # -------------------------------------------------------------------- looking

    def look(self, running: Sequence[Any]) -> Held:
        """What running requests hold now."""
        layers = dict(kinds_of(self.job.layers))
        managers = self._manager.coordinator.single_type_managers
        pairs = []
        for group, manager in zip(self.kv_config.kv_cache_groups, managers, strict=True):
            spec = PeerGroup(
                tuple(layers[name] for name in group.layer_names), group.kv_cache_spec.block_size
            )
            pairs.append((spec, [_table(request, manager) for request in running]))
        return held(pairs, self.page_bytes)

    def described(self) -> dict[str, Any]:
        """Groups and pages, for the report."""
        return {
            "page_tokens": self.page_tokens,
            "groups": len(self.kv_config.kv_cache_groups),
            "num_pages": self.kv_config.num_blocks,
            "page_bytes": self.page_bytes,
        }


def _table(request: Any, manager: Any) -> Table:
    blocks = manager.req_to_blocks.get(request.request_id, ())
    pages = [None if block.is_null else block.block_id for block in blocks]
    return request.num_computed_tokens, pages

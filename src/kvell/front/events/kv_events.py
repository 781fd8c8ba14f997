"""Notices of instances in vLLM's schema of KV events.

Messages are msgpack: a batch is an array, an event a map with its ``type``, as vLLM sends them
since 0.26; fields with their default are left out.  Source: ``vllm/distributed/kv_events.py``.
"""

import hashlib

import msgspec
import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.notices import (
    NO_BLOCK,
    BlocksHeld,
    BlocksStored,
    IndexNotice,
)

MEDIUM = "GPU"
"""vLLM's name of the pool that attention reads, used for a CPU too."""
KINDS = {
    "full": "full_attention",
    "sliding": "sliding_window",
    "chunked": "chunked_local_attention",
    "state": "mamba",
    "dropping": "full_attention",
}


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """An event; its type is the name of its class."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks that are now cached in one group.

    ``extra_keys`` has what identifies each block in addition to its tokens: a digest of the cache
    salt, and one of the images in it, whose tokens are given as 0.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks that are no longer cached in a group."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """The eviction of all blocks of an instance."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one instance, in order.

    :ivar ts: seconds since 1970.
    :ivar data_parallel_rank: the number of the instance.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def events_of(notice: IndexNotice) -> list[Event]:
    return [
        _stored(change)
        if isinstance(change, BlocksStored)
        else BlockRemoved(list(change.hashes), MEDIUM, change.group)
        for change in notice.changes
        if not isinstance(change, BlocksHeld)
    ]


def _stored(change: BlocksStored) -> BlockStored:
    tokens = np.frombuffer(change.tokens, "<i4")
    return BlockStored(
        list(change.hashes),
        None if change.parent == NO_BLOCK else change.parent,
        np.maximum(tokens, 0).tolist(),
        change.block_tokens,
        None,
        MEDIUM,
        None,
        _extra_keys(tokens.reshape(-1, change.block_tokens), change.root),
        change.group,
        KINDS.get(change.kind, "unknown"),
        change.window_tokens or None,
    )


def _extra_keys(blocks: npt.NDArray[np.int32], root: str) -> list[tuple[str, ...] | None]:
    has_images: list[bool] = np.any(blocks < 0, axis=1).tolist()
    salt = (root,) if root else ()
    return [
        (*salt, _images_digest(block)) if shows else salt or None
        for block, shows in zip(blocks, has_images, strict=True)
    ]


def _images_digest(block: npt.NDArray[np.int32]) -> str:
    return hashlib.blake2b(np.minimum(block, 0).tobytes(), digest_size=8).hexdigest()

"""Events on the wire are those of vLLM's schema."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from kvell.engine.protocol.notices import NO_BLOCK, BlocksRemoved, BlocksStored, IndexNotice
from kvell.errors import ChangeSomething
from kvell.front.events.events_config import KvEventsConfig, parse_events_config
from kvell.front.events.kv_events import AllBlocksCleared, KVEventBatch, events_of


def on_the_wire(*changes: BlocksStored | BlocksRemoved) -> list[dict[str, object]]:
    batch = KVEventBatch(1.5, events_of(IndexNotice(0, changes)), 2)
    ts, events, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert (ts, rank) == (1.5, 2)
    told: list[dict[str, object]] = events
    return told


def stored(kind: str = "full", *, tokens: list[int], **more: object) -> BlocksStored:
    hashes = tuple(range(1, len(tokens) // 2 + 1))
    content = np.asarray(tokens, "<i4").tobytes()
    told = BlocksStored(0, kind, NO_BLOCK, hashes, content, 2)
    return msgspec.structs.replace(told, **more)


def test_a_stored_block_has_the_fields_that_vllm_sends() -> None:
    assert on_the_wire(stored(tokens=[5, 6, 7, 8])) == [
        {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": [5, 6, 7, 8],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_groups_windows_and_parents_are_told() -> None:
    sliding = stored("sliding", tokens=[1, 2], group=3, parent=2**64 - 1, window_tokens=512)
    (told,) = on_the_wire(sliding)
    assert told["parent_block_hash"] == 2**64 - 1
    assert (told["group_idx"], told["kv_cache_spec_kind"]) == (3, "sliding_window")
    assert told["kv_cache_spec_sliding_window"] == 512
    (state,) = on_the_wire(stored("state", tokens=[1, 2], group=1))
    assert state["kv_cache_spec_kind"] == "mamba"


def test_salts_and_images_are_extra_keys() -> None:
    (told,) = on_the_wire(stored(tokens=[1, 2, -9, 4, -8, 4], root="abcd"))
    keys: Any = told["extra_keys"]
    plain, image, other = keys
    assert plain == ["abcd"]
    assert image[0] == other[0] == "abcd" and image[1] != other[1]
    assert told["token_ids"] == [1, 2, 0, 4, 0, 4]


def test_removed_and_cleared_blocks() -> None:
    assert on_the_wire(BlocksRemoved(1, (7, 8))) == [
        {"type": "BlockRemoved", "block_hashes": [7, 8], "medium": "GPU", "group_idx": 1}
    ]
    cleared = msgspec.msgpack.encode(KVEventBatch(1.0, [AllBlocksCleared()], 4))
    assert msgspec.msgpack.decode(cleared) == [1.0, [{"type": "AllBlocksCleared"}], 4]


def test_what_vllm_takes_is_taken() -> None:
    given = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 5,
        "hwm": 7,
        "max_queue_size": 100,
        "topic": "kv@pod@model",
    }
    told = parse_events_config(json.dumps(given))
    expected = KvEventsConfig("tcp://*:5557", "tcp://*:5558", 5, 7, "kv@pod@model")
    assert told == expected


@pytest.mark.parametrize(
    "text", ['{"publisher": "null"}', '{"enable_kv_cache_events": false, "hwm": 3}']
)
def test_events_can_be_turned_off(text: str) -> None:
    assert parse_events_config(text) is None


def test_only_this_machine_may_listen_unless_told() -> None:
    config = parse_events_config("{}")
    assert config == KvEventsConfig()
    assert config is not None and config.is_bound


@pytest.mark.parametrize(
    ("endpoint", "is_bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://router:5557", False),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_who_connects_to_whom(endpoint: str, is_bound: bool) -> None:
    assert KvEventsConfig(endpoint).is_bound == is_bound


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"endpont": "tcp://*:1"}', "endpont"),
        ('{"endpoint": 5557}', "endpoint=5557"),
        ('{"endpoint": "5557"}', "endpoint='5557'"),
        ('{"replay_endpoint": "x"}', "replay_endpoint"),
        ('{"hwm": 0}', "hwm=0"),
        ('{"buffer_steps": true}', "buffer_steps=True"),
        ('{"topic": 3}', "topic=3"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ChangeSomething, match="kv_events_config") as raised:
        parse_events_config(text)
    assert named in str(raised.value)

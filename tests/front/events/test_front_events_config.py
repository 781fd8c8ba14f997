"""``--kv-events-config`` as users of vLLM write it."""

import json

import pytest

from kvell.errors import ChangeSomething
from kvell.front.events.events_config import KvEventsConfig, parse_events_config


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

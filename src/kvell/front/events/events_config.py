"""The value of ``--kv-events-config``, as users of vLLM write it."""

from dataclasses import dataclass, fields
from typing import Any

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

FIELD = "kv_events_config"
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"


@dataclass(frozen=True)
class KvEventsConfig:
    """The endpoints and limits of the publisher.

    :param endpoint: bound if it contains ``*`` or ``::`` or is ``ipc://``, else connected to, as in
        vLLM; None binds port 5557 of this machine alone.
    :param replay_endpoint: bound; subscribers request missed batches there.
    :param buffer_steps: number of latest batches that are kept for replays.
    :param hwm: batches that are queued for a slow subscriber before it misses some.
    :param topic: first frame of each message.
    """

    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    @property
    def is_bound(self) -> bool:
        endpoint = "*" if self.endpoint is None else self.endpoint
        is_local = endpoint.startswith(("ipc://", "inproc://"))
        return is_local or "*" in endpoint or "::" in endpoint


def parse_events_config(text: str) -> KvEventsConfig | None:
    """Parse the JSON object of ``--kv-events-config``; return None if it turns events off.

    ``max_queue_size`` is accepted and ignored, since there is no queue.

    :raises ChangeSomething: naming the field that is wrong.
    """
    try:
        given = decode_json(text)
    except MalformedError as error:
        raise _wrong(
            text[:80], f"is not JSON ({error})", 'give \'{"endpoint": "tcp://*:5557"}\''
        ) from error
    if not isinstance(given, dict):
        raise _wrong(text[:80], "is not a JSON object", 'give \'{"endpoint": "tcp://*:5557"}\'')
    on = given.pop("enable_kv_cache_events", True) and given.pop("publisher", "zmq") != "null"
    given.pop("publisher", None)
    given.pop("max_queue_size", None)
    names = {field.name for field in fields(KvEventsConfig)}
    for name, value in given.items():
        _check(name, value, names)
    return KvEventsConfig(**given) if on else None


def _check(name: str, value: Any, names: set[str]) -> None:
    if name not in names:
        raise _wrong(name[:80], "is not a field", f"use {', '.join(sorted(names))}")
    if name in ("buffer_steps", "hwm"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _wrong(f"{name}={value!r}"[:80], "is not a number of batches", "use 1 or more")
    elif name == "topic":
        if not isinstance(value, str):
            raise _wrong(f"topic={value!r}"[:80], "is not text", "use a text, or leave it out")
    elif value is not None and not (isinstance(value, str) and "://" in value):
        raise _wrong(f"{name}={value!r}"[:80], "is not an address", "use one like tcp://*:5557")


def _wrong(value: str, problem: str, remedy: str) -> ChangeSomething:
    return ChangeSomething(FIELD, value, problem, remedy)

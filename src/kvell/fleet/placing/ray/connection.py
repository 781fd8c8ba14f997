"""The connection of this process to Ray, and calls over it."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import ray
from ray.exceptions import GetTimeoutError, RayError

from kvell.errors import ChangeSomething
from kvell.fleet.placing.placement import PlacingError
from kvell.fleet.placing.ray.names import NAMESPACE

LOOK_SECONDS = 1.0
"""A call of Ray in a thread returns after this time, so that an end waits for no longer call."""
PROBE_SECONDS = 5.0
"""A port where Ray should listen accepts a connection within this time."""
ATTEMPTS = 3
"""Attempts to connect to a Ray that answers but does not serve yet."""
REASON_CHARS = 120
FAILURES = (RayError, OSError, RuntimeError, ValueError)
"""Exceptions that a call of Ray raises."""

Result = TypeVar("Result")


def connect(address: str) -> None:
    """Connect this process to Ray, quietly.

    :raises ChangeSomething: when no Ray answers at the address.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    for attempt in range(ATTEMPTS):
        try:
            _probe(address)
            ray.init(
                address=address,
                namespace=NAMESPACE,
                logging_level=logging.CRITICAL,
                log_to_driver=False,
                configure_logging=False,
            )
            break
        except FAILURES as error:
            # A cluster that has just started refuses clients at first.
            if attempt + 1 < ATTEMPTS and isinstance(error, ConnectionAbortedError):
                continue
            problem = f"no Ray answers there ({_reason(error)})"
            remedy = "start one with: kvell cluster up, or use local-ray"
            raise ChangeSomething("--cluster", address, problem, remedy) from error
    with contextlib.suppress(AttributeError):  # this process is no client, but a part of Ray
        ray.util.client.ray.get_context().client_worker.log_client.disable_logs()


def disconnect() -> None:
    ray.shutdown()


async def call(call: Callable[[], Result]) -> Result:
    """Run a short call of Ray in a thread, to its end also when the caller is cancelled.

    So nothing is reserved or made later for a caller that was cancelled.

    :raises PlacingError: when the call fails.
    """
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
    except FAILURES as error:
        raise PlacingError(f"Ray: {_reason(error)}") from error


async def await_answer(reference: Any, within_seconds: float, problem: str) -> Any:
    """Return the answer of an actor.

    :param reference: the reference that the call of the actor returned.
    :raises PlacingError: when the call fails, or is not answered in time.
    """
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return await asyncio.to_thread(ray.get, reference, timeout=LOOK_SECONDS)
        except GetTimeoutError as error:
            if time.monotonic() >= deadline:
                raise PlacingError(f"{problem} ({within_seconds:g} s)") from error
        except FAILURES as error:
            raise PlacingError(f"{problem} ({_reason(error)})") from error


def _probe(address: str) -> None:
    """Check that a process listens there: Ray itself would try for more than a minute.

    :raises OSError: when none does.
    """
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), PROBE_SECONDS).close()


def _reason(error: Exception) -> str:
    """Return the beginning of the last line: the lines before it say where the error was raised."""
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)[:REASON_CHARS]

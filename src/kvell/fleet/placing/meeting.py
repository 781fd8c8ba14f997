"""Find a cluster's manager in a process of its own.

::

    front ── stdin: where Ray is, the settings ──► kvell meet ──► Ray ──► the manager's actor
          ◄── stdout: where the manager listens ──      └─ ends

So a front has nothing of Ray: neither threads and signals, nor an exit when Ray's head is lost.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.manager.settings import ClusterSettings
from kvell.wire.decoding import MalformedError, decode

PROGRAM = (sys.executable, "-m", "kvell.cli.main", "meet")
MEETING_SECONDS = 120.0
"""Time to find a manager, which Ray may first have to start."""


class Met(msgspec.Struct, frozen=True, tag=True):
    """Reply: the manager was found.

    :param address: where the manager listens, like ``tcp://10.0.0.1:5000``.
    """

    address: str
    secret: bytes


class MustChange(msgspec.Struct, frozen=True, tag=True):
    """Reply: the user must change something; fields as of :class:`.ChangeSomething`."""

    field: str
    value: str
    problem: str
    remedy: str


class NotNow(msgspec.Struct, frozen=True, tag=True):
    """Reply: the manager was not found, and may be later."""

    problem: str


Reply = Met | MustChange | NotNow
_REPLY = msgspec.msgpack.Decoder(Reply)
_ASKED = msgspec.msgpack.Decoder(tuple[str, ClusterSettings])


async def meet(
    cluster: str, settings: ClusterSettings, program: Sequence[str] = PROGRAM
) -> tuple[str, bytes]:
    """Return where the manager listens, and the cluster's secret.

    :param cluster: Ray's address.
    :param settings: of the cluster, if there is none of this name.
    :raises ChangeSomething: when no Ray answers.
    :raises TryLater: when the manager does not answer, or the program fails.
    """
    child = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(MEETING_SECONDS):
            said, _ = await child.communicate(msgspec.msgpack.encode((cluster, settings)))
        reply: Reply = decode(_REPLY, said)
    except (TimeoutError, MalformedError) as error:
        raise TryLater(f"the cluster's manager was not found ({error})") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    if isinstance(reply, MustChange):
        raise ChangeSomething(reply.field, reply.value, reply.problem, reply.remedy)
    if isinstance(reply, NotNow):
        raise TryLater(reply.problem)
    return reply.address, reply.secret


def answer(
    question: bytes,
    met: Callable[[str, ClusterSettings], Coroutine[object, object, tuple[str, bytes]]],
) -> bytes:
    """Return the program's output.

    :param met: finds the manager; may raise ChangeSomething or TryLater.
    """
    reply: Reply
    try:
        reply = Met(*asyncio.run(met(*decode(_ASKED, question))))
    except ChangeSomething as error:
        reply = MustChange(error.field, str(error.value), error.problem, error.remedy)
    except TryLater as error:
        reply = NotNow(str(error))
    return msgspec.msgpack.encode(reply)

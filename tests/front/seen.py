"""Accessors of the front's parts that tests look at."""

import asyncio

from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.messages import Finished
from kvell.fleet.fleet import Fleet, Handle
from kvell.fleet.instance.instance_process import InstanceLine
from kvell.fleet.started.members import Members
from kvell.fleet.started.supervisor import Supervisor
from kvell.front.front import Front
from kvell.front.request_log import LogEntry, Output
from kvell.front.request_queue import RequestQueue


def end_of(request: LogEntry) -> Finished | None:
    """Return the end that a request's reader will receive, or None while there is none."""
    return request.mailbox._finished


def taken(request: LogEntry) -> Output:
    return asyncio.run(asyncio.wait_for(request.mailbox.take(), 1))


def queue_of(front: Front) -> RequestQueue:
    return front._request_queue


def members_of(front: Front) -> Fleet[Handle]:
    return front._members


def own_members_of(front: Front) -> Members:
    """Return the instances that a front has started itself."""
    members = front._members
    assert isinstance(members, Members)
    return members


def front_of(engine: AsyncEngine) -> Front:
    return engine._front


def line_to(supervisor: Supervisor) -> InstanceLine:
    process = supervisor._process
    assert process is not None
    return process.line

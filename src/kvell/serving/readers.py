"""One engine in this process for several readers; each receives the events of its requests.

::

    caller's thread                     the engine's thread
      │ ── send, cancel ──────────────►  requests of all readers, in turn within the credits
      │ ── take ──────────────────────►  steps while a reader waits
      │ ◄── events of this reader ─────
      │ ── close ─────────────────────►  cancels the reader's unfinished requests

A signal handler may raise at any bytecode of the main thread: Ctrl-C, or a timeout of the caller.
Steps run on a separate thread, where no handler runs, so an interrupt never falls between a plan
and its commit.  Callers and engine share only queues with atomic operations.  A reader that an
interrupt left open is closed when its object is freed.

If a step raises, all requests fail with that exception, and the engine starts again without
requests (:meth:`RecoverableEngine.abandon`).
"""

import contextlib
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice
from queue import Empty, SimpleQueue
from typing import Protocol, Self, TypeVar

from kvell.engine.protocol.messages import Cancel, Event, Finished, Submit
from kvell.serving.gate import Engine
from kvell.serving.lone import LocalInstance
from kvell.vocabulary import RequestId
from kvell.wire.bell import Bell

Result = TypeVar("Result")
WAIT_SECONDS = 1.0
"""The time between two checks that the engine's thread still runs."""
JOIN_SECONDS = 10.0
"""The longest wait for the engine's thread to end its step when the owner is freed."""


class RecoverableEngine(Engine, Protocol):
    """An engine that can start again after an exception."""

    def abandon(self) -> None:
        """Drop all requests and the cache, whatever state an exception has left them in.

        :raises RuntimeError: if the engine cannot serve any further request.
        """
        ...


class EngineEnded(RuntimeError):  # noqa: N818 - the name says what happened
    """The error after the engine's thread has ended, or in a fork of the engine's process."""


class _Mailbox:
    """The requests and events of one reader.

    :ivar replies: batches of events, or the exception that ended all requests.
    :ivar waiting: requests that have no credit yet.
    :ivar undo: functions to call when the reader is closed, the last one first.
    """

    def __init__(self) -> None:
        self.replies: SimpleQueue[list[Event] | BaseException] = SimpleQueue()
        self.waiting: deque[Submit] = deque()
        self.running: set[RequestId] = set()
        self.events: list[Event] = []
        self.undo: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        self.wants = False

    def answer(self) -> None:
        if self.wants and (self.failure is not None or self.events):
            self.wants = False
            self.replies.put(self.events if self.failure is None else self.failure)
            self.events = []


class _EngineThread:
    """The work of the engine's thread, which calls every method but :meth:`post`."""

    def __init__(self, engine: RecoverableEngine, begin: Callable[[], None]) -> None:
        self._engine, self._begin = engine, begin
        self._instance = LocalInstance(engine)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = Bell()
        self._mailboxes: list[_Mailbox] = []
        self._owners: dict[RequestId, _Mailbox] = {}
        self._broken: BaseException | None = None
        self._is_over = False

    def post(self, command: Callable[[], None]) -> None:
        """Have the thread call a function; from any thread, finalizer or signal handler."""
        self._commands.put(command)
        self._bell.ring()

    def run(self) -> None:
        """Serve until :meth:`end`."""
        self._begin()
        while not self._is_over:
            if not any(mailbox.wants for mailbox in self._mailboxes):
                select.select([self._bell.descriptor], [], [])
            self._bell.clear()
            with contextlib.suppress(Empty):
                while not self._is_over:
                    self._guard(self._commands.get_nowait())
            if any(mailbox.wants for mailbox in self._mailboxes):
                self._guard(self._turn)
        del self._engine, self._instance  # readers that are still open refer to this object

    def end(self) -> None:
        self._is_over = True

    def open(self, mailbox: _Mailbox) -> None:
        mailbox.failure = self._broken
        self._mailboxes.append(mailbox)

    def enqueue(self, mailbox: _Mailbox, command: Submit) -> None:
        if mailbox.failure is None:
            mailbox.waiting.append(command)
            self._spend_credits()

    def cancel(self, mailbox: _Mailbox, request_id: RequestId) -> None:
        if request_id in mailbox.running:
            self._instance.send(Cancel(request_id))

    def want(self, mailbox: _Mailbox) -> None:
        mailbox.wants = True
        mailbox.answer()

    def close(self, mailbox: _Mailbox, closed: Callable[[], None] | None = None) -> None:
        """Cancel all requests of a reader, and remove the reader."""
        try:
            if mailbox in self._mailboxes:
                self._mailboxes.remove(mailbox)
                self._drop(mailbox)
        finally:
            if closed is not None:
                closed()

    def _drop(self, mailbox: _Mailbox) -> None:
        mailbox.waiting.clear()
        for request_id in list(mailbox.running):
            self._instance.send(Cancel(request_id))
        self._deliver(self._instance.answers())
        while mailbox.running:  # a step in flight still uses pages and images
            self._deliver(self._instance.poll())
        for undo in reversed(mailbox.undo):
            undo()
        mailbox.failure = None
        self._spend_credits()

    def _turn(self) -> None:
        self._deliver(self._instance.poll(self._bell.descriptor))
        self._spend_credits()
        if not self._instance.has_work():  # a reader without requests waits in vain
            for mailbox in self._mailboxes:
                if mailbox.wants and not (mailbox.running or mailbox.waiting):
                    mailbox.wants = False
                    mailbox.replies.put([])

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            request_id = getattr(event, "request_id", None)
            mailbox = None if request_id is None else self._owners.get(request_id)
            if mailbox is None:
                continue
            mailbox.events.append(event)
            if isinstance(event, Finished):
                del self._owners[event.request_id]
                mailbox.running.discard(event.request_id)
        for mailbox in self._mailboxes:
            mailbox.answer()

    def _spend_credits(self) -> None:
        """Submit waiting requests, one of each reader in turn."""
        free = self._instance.credits - len(self._owners)
        waiting = [mailbox for mailbox in self._mailboxes if mailbox.waiting]
        total = sum(len(mailbox.waiting) for mailbox in waiting)
        for mailbox in islice(cycle(waiting), len(waiting) * total):
            if free <= 0 or not total:
                return
            if mailbox.waiting:
                command = mailbox.waiting.popleft()
                self._owners[command.request_id] = mailbox
                mailbox.running.add(command.request_id)
                self._instance.send(command)
                free, total = free - 1, total - 1

    def _guard(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as failure:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        self._owners.clear()
        try:
            self._engine.abandon()
            self._instance = LocalInstance(self._engine)
        except BaseException as broken:
            self._broken = RuntimeError(
                f"the engine cannot go on after {type(failure).__name__} ({broken}); make a new LLM"
            )
            self._broken.__cause__ = failure
        for mailbox in self._mailboxes:
            mailbox.failure = failure
            mailbox.waiting.clear()
            mailbox.running.clear()
            mailbox.events = []
            mailbox.answer()


class EventReader:
    """The requests of one caller; ``with shared.reader() as reader:`` cancels unfinished ones.

    :ivar undo: functions that the engine's thread calls when the reader is closed, the last first.
    """

    def __init__(self, thread: _EngineThread, shared: "SharedInstance") -> None:
        self._thread = thread
        self._mailbox = _Mailbox()
        self.undo = self._mailbox.undo
        self._shared = shared  # keeps the thread alive
        self._finalizer = weakref.finalize(self, thread.post, partial(thread.close, self._mailbox))
        self._finalizer.atexit = False
        thread.post(partial(thread.open, self._mailbox))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def send(self, command: Submit) -> None:
        self._thread.post(partial(self._thread.enqueue, self._mailbox, command))

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; :meth:`take` still returns its :class:`Finished`."""
        self._thread.post(partial(self._thread.cancel, self._mailbox, request_id))

    def take(self) -> list[Event]:
        """Wait for events, and return all since the last call.

        :raises BaseException: the exception of a failed step.
        :raises EngineEnded: if the engine's thread has ended.
        """
        self._thread.post(partial(self._thread.want, self._mailbox))
        reply = self._shared.wait(self._mailbox.replies)
        try:
            if isinstance(reply, BaseException):
                raise reply
            return reply
        finally:
            del reply  # the traceback of an exception refers to this frame

    def close(self) -> None:
        """Cancel all requests that have not ended, and wait until they have."""
        if self._shared.is_this_thread():  # freed with a generator, by a step's garbage collection
            self._thread.post(partial(self._thread.close, self._mailbox))
        else:
            closed: SimpleQueue[None] = SimpleQueue()
            done = partial(closed.put, None)
            self._thread.post(partial(self._thread.close, self._mailbox, done))
            with contextlib.suppress(EngineEnded):  # a generator that is freed at exit
                self._shared.wait(closed)
        self._finalizer.detach()


class SharedInstance:
    """An engine on a separate thread, which ends with this object.

    :param begin: called first on that thread.
    """

    def __init__(self, engine: RecoverableEngine, begin: Callable[[], None]) -> None:
        self._work = _EngineThread(engine, begin)
        self._thread = threading.Thread(target=self._work.run, name="kvell-engine", daemon=True)
        self._end = weakref.finalize(self, _end, self._work, self._thread, JOIN_SECONDS)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its step, and wait for that; readers then raise ``EngineEnded``."""
        if self._end.detach():
            _end(self._work, self._thread, None)

    def reader(self) -> EventReader:
        return EventReader(self._work, self)

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def wait(self, replies: "SimpleQueue[Result]") -> Result:
        """Wait for an item that the engine's thread puts into a queue.

        :raises EngineEnded: if the thread has ended, or belongs to another process.
        """
        while True:
            with contextlib.suppress(Empty):
                return replies.get(timeout=WAIT_SECONDS)
            if not self._thread.is_alive():
                raise EngineEnded("the engine of this process has ended; make a new LLM")

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the engine's thread, between steps; return or raise its outcome."""
        settled: SimpleQueue[Future[Result]] = SimpleQueue()
        self._work.post(partial(_settle, settled, function))
        return self.wait(settled).result()


def _settle(settled: "SimpleQueue[Future[Result]]", function: Callable[[], Result]) -> None:
    outcome: Future[Result] = Future()
    try:
        outcome.set_result(function())
    except BaseException as problem:
        outcome.set_exception(problem)
    settled.put(outcome)


def _end(work: _EngineThread, thread: threading.Thread, seconds: float | None) -> None:
    work.post(work.end)
    if thread.is_alive() and threading.current_thread() is not thread:
        thread.join(seconds)

"""One engine in this process for several readers, each of which receives its own events.

::

    caller's thread                     the engine's thread
      │ ── send, cancel ──────────────►  requests of all readers, in turn within the credits
      │ ── take ──────────────────────►  steps while some reader waits
      │ ◄── events of this reader ─────
      │ ── close ─────────────────────►  cancels what the reader still has

A signal handler may raise at any bytecode of the main thread: Ctrl-C, or a timeout of the caller.
Steps run on a thread of their own, where no handler runs, so an interrupt never falls between a
plan and its commit.  Callers and engine share nothing but queues whose operations are atomic.  A
reader that is not closed, because an interrupt came first, is closed when its object is freed.

If a step raises, all requests fail with that exception, and the engine begins again without any
(:meth:`RecoverableEngine.abandon`).
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
"""Between two looks at whether the engine's thread still runs."""
JOIN_SECONDS = 10.0
"""Longest wait for the engine's thread when its owner is freed: the end of a step."""


class RecoverableEngine(Engine, Protocol):
    """An engine that can begin again after an exception."""

    def abandon(self) -> None:
        """Forget all requests and the cache, whatever state an exception has left them in.

        :raises RuntimeError: if the engine cannot serve any further request.
        """
        ...


class EngineEnded(RuntimeError):  # noqa: N818 - it says what happened
    """The engine's thread has ended: with its process, or it is that of a process which forked."""


class _Mailbox:
    """The requests of one reader, and its events.

    :ivar replies: batches of events, or the exception that ended all requests.
    :ivar waiting: requests for which there is no credit yet.
    :ivar running: requests that the instance has.
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
        """Reply to a reader that waits, if there is anything for it."""
        if self.wants and (self.failure is not None or self.events):
            self.wants = False
            self.replies.put(self.events if self.failure is None else self.failure)
            self.events = []


class _EngineThread:
    """What the engine's thread does; every method but :meth:`post` is called on it."""

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

    def end(self) -> None:
        """End the thread; no reader is left."""
        self._is_over = True

    def open(self, mailbox: _Mailbox) -> None:
        """Serve another reader."""
        mailbox.failure = self._broken
        self._mailboxes.append(mailbox)

    def enqueue(self, mailbox: _Mailbox, command: Submit) -> None:
        """Queue a request of a reader."""
        if mailbox.failure is None:
            mailbox.waiting.append(command)
            self._spend_credits()

    def cancel(self, mailbox: _Mailbox, request_id: RequestId) -> None:
        """Cancel a request of a reader, which still receives its end."""
        if request_id in mailbox.running:
            self._instance.send(Cancel(request_id))

    def want(self, mailbox: _Mailbox) -> None:
        """Note that a reader waits for events."""
        mailbox.wants = True
        mailbox.answer()

    def close(self, mailbox: _Mailbox, closed: Callable[[], None] | None = None) -> None:
        """Cancel all that a reader has, and forget the reader.

        :param closed: called at the end.
        """
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
        while mailbox.running:  # of a step in flight, which still uses pages and images
            self._deliver(self._instance.poll())
        for undo in reversed(mailbox.undo):
            undo()
        mailbox.failure = None
        self._spend_credits()

    def _turn(self) -> None:
        """Run a step, or wait until there is one or a command."""
        self._deliver(self._instance.poll(self._bell.descriptor))
        self._spend_credits()
        if not self._instance.has_work():  # a reader waits for what cannot come
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
        """Submit what waits, a request of each reader in turn."""
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
        """Call a function; if it raises, all requests fail and the engine begins again."""
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
    """The requests of one caller; ``with shared.reader() as reader:`` cancels what is left."""

    def __init__(self, thread: _EngineThread, shared: "SharedInstance") -> None:
        self._thread, self._mailbox = thread, _Mailbox()
        self._shared = shared  # the thread lives as long as this
        self._finalizer = weakref.finalize(self, thread.post, partial(thread.close, self._mailbox))
        self._finalizer.atexit = False
        thread.post(partial(thread.open, self._mailbox))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def send(self, command: Submit) -> None:
        """Start a request, as soon as there is a credit."""
        self._thread.post(partial(self._thread.enqueue, self._mailbox, command))

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; its end still comes."""
        self._thread.post(partial(self._thread.cancel, self._mailbox, request_id))

    def take(self) -> list[Event]:
        """Wait for events, and return all that came since the last call.

        :raises BaseException: what a step raised.
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

    def at_close(self, undo: Callable[[], None]) -> None:
        """Have the engine's thread call a function when the reader is closed."""
        self._mailbox.undo.append(undo)

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
    """An engine on a thread of its own, which ends with this object.

    :param begin: called first on that thread.
    """

    def __init__(self, engine: RecoverableEngine, begin: Callable[[], None]) -> None:
        self._work = _EngineThread(engine, begin)
        self._thread = threading.Thread(target=self._work.run, name="kvell-engine", daemon=True)
        weakref.finalize(self, _end, self._work, self._thread)
        self._thread.start()

    def reader(self) -> EventReader:
        """Return a reader for a caller's requests."""
        return EventReader(self._work, self)

    def is_this_thread(self) -> bool:
        """Whether the caller is on the engine's thread."""
        return threading.current_thread() is self._thread

    def wait(self, replies: "SimpleQueue[Result]") -> Result:
        """Wait for what the engine's thread puts into a queue.

        :raises EngineEnded: if it has ended, or is another process's.
        """
        while True:
            with contextlib.suppress(Empty):
                return replies.get(timeout=WAIT_SECONDS)
            if not self._thread.is_alive():
                raise EngineEnded("this process has no engine any more; make a new LLM")

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


def _end(work: _EngineThread, thread: threading.Thread) -> None:
    work.post(work.end)
    if thread.is_alive() and threading.current_thread() is not thread:
        thread.join(JOIN_SECONDS)

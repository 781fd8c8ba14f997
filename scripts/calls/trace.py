"""Trace plain chat requests through a real server, and count calls by process.

Processes also poll, and exchange heartbeats.  A slow or busy processor adds such calls to requests,
but takes none from it, so small counts are those of the work itself: of a request, the smallest of
several equal requests; of a token, a low percentile of many tokens.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import kvell
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS

SHORT_TOKENS, LONG_TOKENS = 1, 41
SHORT_REQUESTS, LONG_REQUESTS = 10, 3
LOW = 0.2
"""Of each function, this part of the tokens may have fewer calls than are counted."""
PATIENCE_SECONDS = 120.0
SETTLE_SECONDS = 0.1
"""Time in which the processes finish what a request has left to do."""
HOOK = Path(__file__).with_name("hook")
SOURCE = Path(kvell.__file__).parent
SERVE = ("serve", "smollm2", "--port", "0", "--json", "--kv-memory", "128MiB")

Calls = list[str]
"""Functions in the order of their calls; a function is ``file:name``."""
Counts = dict[str, int]
"""The number of calls of each function."""


class TooBusyError(Exception):
    """The machine is too busy to tell calls of requests from those of heartbeats."""


@dataclass(frozen=True)
class Ladder:
    """What one kind of work calls.

    :param calls: by function; a function without calls is absent.
    """

    calls: Counts

    @property
    def num_calls(self) -> int:
        """All calls."""
        return sum(self.calls.values())

    @property
    def num_files(self) -> int:
        """Files that have a function that is called."""
        return len({name.partition(":")[0] for name in self.calls})

    def figures(self) -> dict[str, int]:
        """Return all numbers, by name."""
        functions = len(self.calls)
        return {"calls": self.num_calls, "functions": functions, "files": self.num_files}


def ladders(cache_dir: Path) -> dict[str, Ladder]:
    """Serve the packaged model and return what requests call, by kind of work.

    :param cache_dir: the folder of the packaged model.
    :raises TooBusyError: if requests take so long that each has heartbeats.
    """
    with TracedServer.start(cache_dir) as server:
        short = quick_requests(server)
        long = [server.calls(LONG_TOKENS) for _ in range(LONG_REQUESTS)]
    table = {}
    for process in ("front", "instance"):
        requests = [Counter(calls[process]) for calls in short]
        tokens = [token for calls in long for token in by_token(calls[process], requests[0])]
        table[f"{process}: request of one token"] = Ladder(low(requests, 0.0))
        table[f"{process}: each further token"] = Ladder(low(tokens, LOW))
    return table


def quick_requests(server: "TracedServer") -> list[dict[str, Calls]]:
    """Return the calls of short requests that took less time than passes between heartbeats."""
    requests: list[dict[str, Calls]] = []
    end_seconds = time.monotonic() + PATIENCE_SECONDS
    while len(requests) < SHORT_REQUESTS:
        start_seconds = time.monotonic()
        calls = server.calls(SHORT_TOKENS)
        if time.monotonic() - start_seconds < HEARTBEAT_SECONDS:
            requests.append(calls)
        elif time.monotonic() > end_seconds:
            raise TooBusyError("requests of one token take longer than passes between heartbeats")
    return requests


def by_token(calls: Calls, short: Counts) -> list[Counts]:
    """Return the counts for each further token of a long request.

    A token ends where a function is called that is called exactly once for every token.

    :param short: the counts of a short request.
    """
    further = LONG_TOKENS - SHORT_TOKENS
    counts = Counter(calls)
    steady = [name for name in counts if counts[name] - short.get(name, 0) == further]
    boundary = min(steady, key=lambda name: (short.get(name, 0) != SHORT_TOKENS, name))
    ends = [at for at, name in enumerate(calls) if name == boundary]
    return [Counter(calls[start:end]) for start, end in pairwise(ends)]


def low(samples: Sequence[Counts], part: float) -> Counts:
    """Return a low count of each function, without those whose count is 0.

    :param part: the part of the samples with a smaller count; 0 for the smallest count.
    """
    at = int(part * len(samples))
    names = sorted({name for counts in samples for name in counts})
    counts = {name: sorted(counts.get(name, 0) for counts in samples)[at] for name in names}
    return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True)
class TracedServer:
    """A server whose processes list calls.

    :param list_file: the processes list calls while it exists.
    :param pids: the processes that are traced, by name: ``front`` and ``instance``.
    """

    process: subprocess.Popen[str]
    url: str
    list_file: Path
    pids: dict[str, str]

    @classmethod
    @contextmanager
    def start(cls, cache_dir: Path) -> Iterator["TracedServer"]:
        """Start a server with the hook, and stop it at the end."""
        with TemporaryDirectory() as folder:
            list_file = Path(folder, "list")
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]),
                "KVELL_CACHE_DIR": str(cache_dir),
                "CALLS_FILE": str(list_file),
                "CALLS_SOURCE": str(SOURCE),
            }
            command = [sys.executable, "-m", "kvell.cli.main", *SERVE]
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            ) as process:
                try:
                    assert process.stdout is not None
                    url = json.loads(process.stdout.readline())["url"]
                    server = cls(process, url, list_file, {"front": str(process.pid)})
                    wait_until(server.has_instance)
                    yield server
                finally:
                    process.send_signal(signal.SIGTERM)
                    process.wait(PATIENCE_SECONDS)

    def has_instance(self) -> bool:
        """Have a request answered, and return whether the instance's process has listed it."""
        self._trace(8)
        for pid in self._pids("json") - {self.pids["front"]}:
            if any(name.startswith("engine/running") for name in self._calls(pid)):
                self.pids["instance"] = pid
        return "instance" in self.pids

    def calls(self, tokens: int) -> dict[str, Calls]:
        """Return what one request of some tokens calls, by process."""
        self._trace(tokens)
        return {name: self._calls(pid) for name, pid in self.pids.items()}

    def _trace(self, tokens: int) -> None:
        """Have the known processes list what a request of some tokens calls."""
        for path in self.list_file.parent.glob("*.*"):
            path.unlink(missing_ok=True)
        pids = set(self.pids.values())
        self.list_file.touch()
        wait_until(lambda: self._pids("began") >= pids)
        self._ask(tokens)
        time.sleep(SETTLE_SECONDS)
        self.list_file.unlink()
        wait_until(lambda: self._pids("json") >= pids)

    def _calls(self, pid: str) -> Calls:
        """Return what a process listed last."""
        calls: Calls = json.loads(Path(f"{self.list_file}.{pid}.json").read_text())
        return calls

    def _pids(self, kind: str) -> set[str]:
        """Return the processes that have written a file of this kind."""
        paths = self.list_file.parent.glob(f"{self.list_file.name}.*.{kind}")
        return {path.name.split(".")[-2] for path in paths}

    def _ask(self, tokens: int) -> None:
        """Have a plain chat request answered, as a stream."""
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "temperature": 0.7,
            "stream": True,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            answer.read()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    :raises TimeoutError: if it does not hold in time.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("a process of the server does not list calls")
        time.sleep(0.01)

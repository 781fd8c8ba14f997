"""List the calls of Kvell's functions by process; Python imports this file at its start.

``CALLS_FILE`` names a file.  Once it exists, a process lists calls, and creates ``FILE.PID.began``.
Once it is removed, the process writes its list into ``FILE.PID.json``.
``CALLS_SOURCE`` is the folder whose functions are listed; comprehensions are not.  The main thread
is traced from the first list on, so that imports at the start are not slowed down.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

POLL_SECONDS = 0.01


class CallList:
    """The calls of one process."""

    def __init__(self, file: Path, source: str) -> None:
        self._file = file
        self._source = source + os.sep
        self._is_listing = False
        self._calls: list[str] = []
        self._names: dict[CodeType, str] = {}

    def on_event(self, frame: FrameType, event: str, _: object) -> None:
        """List a call; Python calls this at each call and return."""
        if event == "call" and self._is_listing:
            name = self._names.get(frame.f_code)
            if name is None:
                name = self._names[frame.f_code] = self._name(frame.f_code)
            if name:
                self._calls.append(name)

    def _name(self, code: CodeType) -> str:
        """Return ``file:function``, or "" for a function that is not listed."""
        if not code.co_filename.startswith(self._source) or code.co_name.startswith("<"):
            return ""
        return f"{code.co_filename.removeprefix(self._source)}:{code.co_qualname}"

    def follow(self) -> None:
        """Follow the file for as long as the process lives."""
        is_traced = False
        while True:
            time.sleep(POLL_SECONDS)
            is_wanted = self._file.exists()
            if is_wanted == self._is_listing:
                continue
            if not is_traced:
                is_traced = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self._is_listing = is_wanted
            if is_wanted:
                self._write("began", "")
            else:
                self._write("json", json.dumps(self._calls.copy()))
                self._calls.clear()

    def _write(self, kind: str, text: str) -> None:
        """Write a file that exists only once it is complete."""
        path = Path(f"{self._file}.{os.getpid()}.{kind}")
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)


if "CALLS_FILE" in os.environ:
    calls = CallList(Path(os.environ["CALLS_FILE"]), os.environ["CALLS_SOURCE"])
    signal.signal(signal.SIGUSR1, lambda *_: sys.setprofile(calls.on_event))
    threading.setprofile(calls.on_event)
    threading.Thread(target=calls.follow, daemon=True).start()

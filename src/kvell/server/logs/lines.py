"""One line for each event: text for people, JSON for machines."""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TextIO

from kvell.server.logs.background import BackgroundStream, in_background

LogFormat = Literal["text", "json"]
LOGGERS = {"kvell": logging.INFO, "uvicorn": logging.WARNING, "uvicorn.error": logging.WARNING}
"""The loggers whose lines are written, with their lowest level.

``uvicorn.error`` is listed because uvicorn sets its level for the whole process.
"""
FIELDS = "kvell_fields"
"""The attribute of a log record that has an event's fields."""
PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)


def tell(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log an event; fields are numbers and short texts, never a prompt, an output or a key."""
    logger.log(level, event, extra={FIELDS: fields})


class JsonLines(logging.Formatter):
    """A formatter of ``{"time", "level", "event", …}``; a message without fields is ``log``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _time(record).isoformat(timespec="milliseconds")}
        line["level"] = record.levelname.lower()
        fields = _fields(record)
        if fields is None:
            line |= {"event": "log", "logger": record.name, "message": record.getMessage()}
        else:
            line |= {"event": record.getMessage(), **fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """A formatter of ``time LEVEL event name=value …``; ambiguous values are JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_time(record).isoformat(timespec="seconds"), record.levelname]
        fields = _fields(record)
        if fields is None:
            words.append(" ".join(record.getMessage().split()))
        else:
            words.append(record.getMessage())
            words += [f"{name}={_shown(value)}" for name, value in fields.items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@contextmanager
def lines_on(stream: TextIO, log_format: LogFormat) -> Iterator[BackgroundStream]:
    """Write the lines of Kvell and its HTTP server to a stream while the block runs.

    A thread writes them.  The yielded stream takes further texts in the same order.
    """
    formatter = JsonLines() if log_format == "json" else TextLines()
    with ExitStack() as stack:
        background = stack.enter_context(in_background(stream, partial(_unwritten, formatter)))
        handler = logging.StreamHandler(background)
        handler.setFormatter(formatter)
        for name, level in LOGGERS.items():
            stack.enter_context(_written(logging.getLogger(name), level, handler))
        yield background


def _unwritten(formatter: logging.Formatter, lines: int) -> str:
    record = logging.LogRecord("kvell", logging.WARNING, "", 0, "lines_not_written", None, None)
    setattr(record, FIELDS, {"lines": lines})
    return f"{formatter.format(record)}\n"


@contextmanager
def _written(logger: logging.Logger, level: int, handler: logging.Handler) -> Iterator[None]:
    before = logger.level, logger.propagate
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        level_before, logger.propagate = before
        logger.setLevel(level_before)


def _fields(record: logging.LogRecord) -> dict[str, Any] | None:
    fields: dict[str, Any] | None = getattr(record, FIELDS, None)
    return fields


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


logger = logging.getLogger(__name__)

MOST_TOLD = 256
"""The most names that are logged, so that clients with random names cannot fill a disk."""
LONGEST_NAME = 100


class OncePerName:
    """A log with one line per name.

    :param what: field of a line that has the name.
    """

    def __init__(self, event: str, what: str) -> None:
        self._event, self._what = event, what
        self._told: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in sorted({name[:LONGEST_NAME] for name in names} - self._told):
            if len(self._told) >= MOST_TOLD:
                return
            self._told.add(name)
            tell(logger, logging.INFO, self._event, **{self._what: name})

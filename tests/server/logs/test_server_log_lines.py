"""Lines of the log: one for each event, whatever its fields hold."""

import io
import json
import logging
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.logs.lines import LogFormat, lines_on, tell

logger = logging.getLogger("kvell.some.module")


def written(log_format: LogFormat, *events: tuple[str, dict[str, object]]) -> list[str]:
    stream = io.StringIO()
    with lines_on(stream, log_format):
        for event, fields in events:
            tell(logger, logging.INFO, event, **fields)
    text = stream.getvalue()
    assert text.endswith("\n") or not text
    return text.split("\n")[:-1]


def test_json_has_time_level_event_and_fields() -> None:
    [line] = written("json", ("request_ended", {"status": 200, "seconds": 0.25, "model": "é"}))
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    assert told == {
        "level": "info",
        "event": "request_ended",
        "status": 200,
        "seconds": 0.25,
        "model": "é",
    }


def test_text_is_one_readable_line() -> None:
    fields = {"path": "/v1/x", "status": 200, "seconds": 0.123456789, "model": "two words"}
    [line] = written("text", ("request_ended", fields))
    time, _, rest = line.partition(" ")
    assert datetime.fromisoformat(time).tzinfo is not None
    expected = 'request_ended path=/v1/x status=200 seconds=0.123457 model="two words"'
    assert rest == f"INFO {expected}"


@given(st.text(max_size=30))
def test_no_field_makes_a_line_of_its_own(value: str) -> None:
    formats: tuple[LogFormat, ...] = ("text", "json")
    for log_format in formats:
        [line] = written(log_format, ("event", {"path": value, "last": 1}))
        assert line.isprintable() or log_format == "json"
        if log_format == "json":
            assert json.loads(line)["path"] == value
        else:
            assert line.endswith(" last=1")


def test_no_field_imitates_another_in_text() -> None:
    [line] = written("text", ("event", {"path": "x status=200"}))
    assert line.endswith('path="x status=200"')


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_messages_of_other_modules_are_lines_too(
    log_format: LogFormat, caplog: pytest.LogCaptureFixture
) -> None:
    # Another server of this process may have silenced uvicorn's own logger.
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    stream = io.StringIO()
    with lines_on(stream, log_format):
        logger.error("instance %s: %s", "mixed-0", "died\nbadly")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("uvicorn.error").info("not told")
    one, other = stream.getvalue().splitlines()
    if log_format == "json":
        told = json.loads(one)
        assert (told["event"], told["level"], told["logger"]) == ("log", "error", logger.name)
        assert told["message"] == "instance mixed-0: died\nbadly"
        assert json.loads(other)["message"] == "Invalid HTTP request received."
    else:
        assert one.endswith("ERROR instance mixed-0: died badly")
        assert other.endswith("WARNING Invalid HTTP request received.")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_exceptions_keep_their_traceback(log_format: LogFormat) -> None:
    stream = io.StringIO()
    with lines_on(stream, log_format):
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    if log_format == "json":
        assert rest == []
        assert "ValueError: broken" in json.loads(first)["exception"]
    else:
        assert first.endswith("ERROR it failed")
        assert rest[-1] == "ValueError: broken"


def test_nothing_is_left_behind() -> None:
    root = logging.getLogger("kvell")
    before = (root.level, root.propagate, list(root.handlers))
    stream = io.StringIO()
    with lines_on(stream, "text"):
        assert logger.isEnabledFor(logging.INFO)
    assert (root.level, root.propagate, list(root.handlers)) == before
    tell(logger, logging.INFO, "after")
    assert stream.getvalue() == ""

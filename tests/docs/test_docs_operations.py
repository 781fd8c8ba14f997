"""Operations and metrics name what is there: metrics, rungs, reasons, log events, messages."""

import re
from pathlib import Path
from typing import get_args

import pytest

import kvell
from kvell.engine.protocol.pages import MissReason
from tests.docs.fences import DOCS
from tests.docs.tables import names_in, rows_under
from tests.server.metrics.exported import Exported

pytestmark = pytest.mark.xdist_group("exported")

GUIDE = (DOCS / "operations.md").read_text()
METRICS = (DOCS / "metrics.md").read_text()
UNWRAPPED = " ".join(GUIDE.split())
SOURCES = sorted(Path(kvell.__file__).parent.rglob("*.py"))
WITHOUT_SAMPLES = {
    "kvell:spec_decode_num_accepted_tokens_per_pos_total": "position",
    "kvell:device_steps_total": "how",
}
"""Only with draft tokens, and only on a GPU: no labels can be read here."""
INSTANCE = "i"

MESSAGES = (
    "the instance process ended unexpectedly (exit ",
    "two instances ended while they computed it, so it is not retried",
    "was killed",
    "cannot be started; giving up",
    "requests are waiting; retry in a moment",
    "is more than the machine has free",
    "is too small for one request of --max-model-len=",
    "is not a directory, and the hub cannot be reached",
    "there is no such directory",
    "is in use",
    "MiB left for more",
    "is the last one that serves",
    "add one first: kvell cluster scale",
    "missing or wrong API key; send Authorization: Bearer <key>, or x-api-key: <key>",
    "this path needs an operator's API key",
    "per minute is used up; ",
    "allow at most ",
    "no instance serves now (",
    ": the answer took longer",
    "the body exceeds ",
    "This model's maximum context length is",
    "and the prompt is too long",
    "decides how much of a CPU buffer prompts may use, and there is none",
)
"""Fixed parts of messages that the guide quotes."""


def metric_rows() -> dict[str, list[str]]:
    return {names_in(cells[0])[0]: cells for cells in rows_under(METRICS, "metric", "labels")}


def test_the_table_of_metrics_is_what_a_server_exports(exported: Exported) -> None:
    rows = rows_under(METRICS, "metric", "labels")
    told = [names_in(cells[0])[0] for cells in rows]
    assert sorted(set(told) - exported.metrics) == [], "nobody exports these"
    assert sorted(exported.metrics - set(told)) == [], "the guide does not name these"
    assert len(set(told)) == len(told)


def test_the_table_has_the_labels_of_every_metric(exported: Exported) -> None:
    for name, cells in metric_rows().items():
        told = {one.strip() for one in cells[1].split(",")} - {""}
        if name in WITHOUT_SAMPLES:
            assert told == {INSTANCE, WITHOUT_SAMPLES[name]}
            continue
        own = set(exported.labels[name])
        if name.startswith("kvell:"):
            assert "model_name" in own
        shown = {INSTANCE if one == "instance" else one for one in own - {"model_name"}}
        assert told == shown, name


def test_every_metric_has_a_meaning_and_histograms_say_that_they_are(exported: Exported) -> None:
    for name, cells in metric_rows().items():
        assert len(cells) == 4 and len(cells[2]) > 1, name
        is_histogram = f"{name}_bucket" in exported.series
        assert cells[2].startswith("histogram:") == is_histogram, name


def test_every_rung_is_explained(exported: Exported, rungs: frozenset[str]) -> None:
    told = {name for cells in rows_under(METRICS, "rung") for name in names_in(cells[0])}
    assert "rung" in exported.labels["kvell:ladder_rungs_total"]
    assert told == rungs


@pytest.fixture(scope="module")
def rungs(exported: Exported) -> frozenset[str]:
    return exported.values["kvell:ladder_rungs_total", "rung"]


def test_values_of_labels_that_the_table_names_are_there(exported: Exported) -> None:
    for metric, label in (
        ("kvell:memory_contract_part_bytes", "part"),
        ("kvell:memory_chunks", "state"),
        ("kvell:cpu_buffer_large_pages", "state"),
        ("kvell:cpu_buffer_bytes_total", "way"),
        ("kvell:request_success_total", "finished_reason"),
        ("kvell:prompt_tokens_by_source_total", "source"),
        ("kvell:prompt_tokens_cached_by_source_total", "source"),
        ("kvell:admission_rejections_total", "reason"),
        ("kvell:http_connections", "state"),
    ):
        told = names_in(metric_rows()[metric][2])
        values = {one for one in told if not one.startswith("--")}
        assert values == exported.values[metric, label], metric


def test_every_reason_of_a_miss_has_a_remedy() -> None:
    told = [names_in(cells[0])[0] for cells in rows_under(GUIDE, "reason", "what to do")]
    assert sorted(told) == sorted(get_args(MissReason))


def test_every_event_of_the_log_is_in_the_table() -> None:
    told_by = r"tell\(\s*logger,\s*logging\.\w+,\s*|OncePerName\("
    written_by = r'LogRecord\("kvell", logging\.\w+, "", 0, '
    pattern = re.compile(rf'\b(?:{told_by}|{written_by})"(\w+)"')
    written = {event for path in SOURCES for event in pattern.findall(path.read_text())}
    told = {name for cells in rows_under(GUIDE, "event", "fields") for name in names_in(cells[0])}
    assert written == told


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_quoted_as_they_are_written(message: str) -> None:
    assert message.strip() in UNWRAPPED
    assert any(message in path.read_text() for path in SOURCES)

"""The board and the alerts ask for what a real server exports, and the board can be drawn."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.promql import ADDED, problems, read
from tests.docs.fences import DOCS
from tests.server.metrics.exported import Exported

FOLDER = Path(__file__).parents[2] / "dashboards"
LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
MESSAGE_LABEL = re.compile(r"\$labels\.(\w+)")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
INTERVAL = {"__rate_interval": "5m"}


@dataclass(frozen=True)
class Asked:
    """An expression, where it stands, and labels that are shown of its result."""

    place: str
    expression: str
    shown: frozenset[str] = frozenset()


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "kvell.json").read_text())
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board()["panels"]
    return found


def filled_in(text: str) -> str:
    return VARIABLE.sub(lambda match: INTERVAL.get(match[1], ".*"), text)


def on_the_board() -> Iterator[Asked]:
    for panel in panels():
        for target in panel.get("targets", ()):
            shown = frozenset(LEGEND_LABEL.findall(target["legendFormat"]))
            yield Asked(panel["title"], filled_in(target["expr"]), shown)
    for one in board()["annotations"]["list"]:
        if "expr" in one:
            shown = frozenset(LEGEND_LABEL.findall(one["titleFormat"]))
            yield Asked(one["name"], filled_in(one["expr"]), shown)


def in_alerts() -> Iterator[Asked]:
    for rule in alerts():
        shown = frozenset(MESSAGE_LABEL.findall(json.dumps(rule["annotations"])))
        yield Asked(rule["alert"], rule["expr"], shown)


def variables() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in board()["templating"]["list"]}


pytestmark = pytest.mark.xdist_group("exported")

COLUMNS = 24
WANTED = {
    "latency": ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"),
    "load": ("num_requests_running", "num_requests_waiting", "request_queue_time"),
    "throughput": ("generation_tokens", "prompt_tokens"),
    "memory": (
        *("group_used_pages", "group_cached_pages", "memory_chunks", "cpu_buffer_large_pages"),
        *("ladder_rungs", "kv_cache_usage_perc", "process_memory_bytes"),
    ),
    "prefix cache": ("prefix_cache_hits", "prefix_cache_misses"),
    "errors": ("http_responses", "admission_rejections", "request_success", "instance_restarts"),
}


@pytest.mark.parametrize("asked", [*on_the_board(), *in_alerts()], ids=lambda one: one.place)
def test_every_metric_and_label_is_exported(asked: Asked, exported: Exported) -> None:
    assert list(problems(asked.expression, exported.series, asked.shown)) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 + 1", "it uses no metric"),
        ("rate(kvell:steps[5m])", "kvell:steps is not exported"),
        ('kvell:steps_total{group="full"}', "kvell:steps_total has no label group"),
        ("sum by (group) (kvell:steps_total)", "no metric of it has the label group"),
    ],
)
def test_what_is_not_exported_is_found(expression: str, problem: str, exported: Exported) -> None:
    assert list(problems(expression, exported.series)) == [problem]


def test_names_that_servers_export_are_read_from_one(exported: Exported) -> None:
    assert "kvell:steps_total" in exported.metrics
    assert exported.series["kvell:time_to_first_token_seconds_bucket"] == {"model_name", "le"}
    assert exported.labels["kvell:group_used_pages"] == {"model_name", "instance", "group"}


def test_panels_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids) > 30


def test_panels_lie_in_the_grid_and_none_over_another() -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS, panel["title"]
        columns = range(place["x"], place["x"] + place["w"])
        taken.update(itertools.product(columns, range(place["y"], place["y"] + place["h"])))
    assert max(taken.values()) == 1


def test_panels_follow_each_other_without_a_gap_of_a_whole_line() -> None:
    lines = {
        line
        for panel in panels()
        for line in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    assert lines == set(range(max(lines) + 1))


def test_every_panel_says_what_it_shows() -> None:
    shown = [panel for panel in panels() if panel["type"] != "row"]
    assert all(panel["description"] and panel["targets"] for panel in shown)
    assert all(panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "heatmap"
               for panel in shown)  # fmt: skip
    titles = Counter(panel["title"] for panel in shown if panel["type"] == "timeseries")
    assert titles.most_common(1)[0][1] <= 2


@pytest.mark.parametrize("what", WANTED)
def test_the_board_has_what_an_operator_looks_for(what: str) -> None:
    used = {use.metric for asked in on_the_board() for use in read(asked.expression).uses}
    for name in WANTED[what]:
        assert any(metric.startswith(f"kvell:{name}") for metric in used), name


def test_counters_are_never_shown_as_they_are() -> None:
    for asked in on_the_board():
        for name in re.findall(r"[\w:]+_(?:total|bucket|sum|count)\b", asked.expression):
            assert re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[", asked.expression), asked


def test_the_data_source_is_a_variable_and_all_variables_are_used() -> None:
    known = variables()
    assert known["datasource"]["type"] == "datasource"
    assert {"model", "instance", "server"} <= set(known)
    text = (FOLDER / "kvell.json").read_text()
    used = set(VARIABLE.findall(text)) - {"__rate_interval", "__all"}
    assert used == set(known)
    sources = [panel["datasource"]["uid"] for panel in panels() if panel["type"] != "row"]
    assert set(sources) == {"${datasource}"}


def test_variables_take_their_values_from_metrics_that_have_them(exported: Exported) -> None:
    for name in ("model", "server", "instance"):
        query: str = variables()[name]["query"]["query"]
        [(metric, label)] = re.findall(r"label_values\((kvell:\w+)(?:\{.*\})?, (\w+)\)", query)
        assert label in exported.labels[metric] | ADDED


def test_every_metric_that_has_an_instance_is_chosen_by_it(exported: Exported) -> None:
    """Otherwise the variable would change some panels of a row and not the others."""
    whole = {"Waiting"}
    """The front's line and all instances together."""
    for panel in panels():
        for target in panel.get("targets", ()):
            for use in read(target["expr"].replace("$__rate_interval", "5m")).uses:
                if "instance" in exported.series[use.metric] and panel["title"] not in whole:
                    assert "instance" in use.labels, panel["title"]


def test_alerts_say_who_how_bad_and_what() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 8
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "$labels.server" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_labels_in_messages_survive_the_expression() -> None:
    """What is summed away cannot be shown."""
    for rule in alerts():
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        kept = re.findall(r"sum by \(([^)]*)\)", rule["expr"])
        for labels in kept:
            assert shown <= {one.strip() for one in labels.split(",")}, rule["alert"]


def test_the_guide_says_what_to_do_about_every_alert() -> None:
    guide = (DOCS / "operations.md").read_text() + (DOCS / "metrics.md").read_text()
    assert [rule["alert"] for rule in alerts() if f"`{rule['alert']}`" not in guide] == []


def test_the_scrape_keeps_kvells_own_labels_and_adds_the_server() -> None:
    config: Any = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    [scrape] = config["scrape_configs"]
    assert config["rule_files"] == ["alerts.yml"] and scrape["job_name"] == "kvell"
    assert scrape["honor_labels"] is True
    assert [one["target_label"] for one in scrape["relabel_configs"]] == ["server"]


def test_the_board_is_of_a_current_grafana() -> None:
    told = board()
    assert told["schemaVersion"] >= 39 and told["uid"] == "kvell" and told["title"] == "Kvell"
    assert {panel["type"] for panel in panels()} == {"row", "stat", "timeseries", "heatmap"}

"""The board and the alerts as files, and the expressions in them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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

"""What is wrong with an expression is found, wherever it stands in it."""

import pytest

from tests.dashboards.promql import Use, problems, read

SERIES = {
    "kvell:steps_total": frozenset({"model_name", "instance"}),
    "kvell:time_bucket": frozenset({"model_name", "le"}),
}


def found(expression: str, *shown: str) -> list[str]:
    return list(problems(expression, SERIES, frozenset(shown)))


def test_metrics_and_labels_are_found_at_any_depth() -> None:
    told = read('sum by (le) (rate(kvell:time_bucket{model_name=~"a"}[5m])) / on (x) vector(1)')
    assert told.uses == (Use("kvell:time_bucket", frozenset({"model_name"})),)
    assert told.grouped == {"le", "x"}


@pytest.mark.parametrize(
    "expression",
    [
        "kvell:steps_total",
        'sum by (instance) (rate(kvell:steps_total{model_name="m", server="s"}[5m])) > 3',
        "histogram_quantile(0.9, sum by (le) (rate(kvell:time_bucket[5m])))",
        'up{job="kvell"} == 0',
    ],
)
def test_what_is_exported_is_no_problem(expression: str) -> None:
    assert found(expression) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 + 1", "it uses no metric"),
        ("rate(kvell:steps[5m])", "kvell:steps is not exported"),
        ('kvell:steps_total{group="full"}', "kvell:steps_total has no label group"),
        ("sum by (group) (kvell:steps_total)", "no metric of it has the label group"),
        (
            "kvell:steps_total / on (rung) kvell:time_bucket",
            "no metric of it has the label rung",
        ),
    ],
)
def test_what_is_not_exported_is_told(expression: str, problem: str) -> None:
    assert found(expression) == [problem]


def test_a_legend_may_show_only_labels_that_are_there() -> None:
    assert found("kvell:steps_total", "instance") == []
    assert found("kvell:steps_total", "group") == ["no metric of it has the label group"]


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        read("sum(kvell:steps_total")

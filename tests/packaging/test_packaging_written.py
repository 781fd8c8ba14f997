"""Dockerfiles, units and command lines are read as their programs read them."""

import click
import pytest

from tests.packaging.written import (
    Instruction,
    instructions_of,
    parameters_of,
    settings_of,
    stages_of,
)

DOCKERFILE = """\
# the first line
ARG BASE=python
FROM ${BASE} AS build
RUN one \\
    # among its lines
    && two
FROM ${BASE}
CMD ["serve", "--port", "1"]
"""

UNIT = """\
[Unit]
Description=A = B
; a remark
[Service]
Environment=A=1
# another
Environment=B=2
ExecStart=/bin/true \\
  --flag
CapabilityBoundingSet=
"""


def test_instructions_are_joined_and_comments_dropped() -> None:
    assert instructions_of(DOCKERFILE)[:3] == [
        Instruction("ARG", "BASE=python"),
        Instruction("FROM", "${BASE} AS build"),
        Instruction("RUN", "one && two"),
    ]


def test_stages_start_at_each_from() -> None:
    stages = stages_of(instructions_of(DOCKERFILE))
    assert [[one.word for one in stage] for stage in stages] == [["FROM", "RUN"], ["FROM", "CMD"]]
    assert stages[1][1].words == ["serve", "--port", "1"]


def test_settings_keep_all_values_in_order() -> None:
    settings = settings_of(UNIT)
    assert settings["Environment"] == ["A=1", "B=2"]
    assert settings["Description"] == ["A = B"]
    assert settings["ExecStart"][0].split() == ["/bin/true", "--flag"]
    assert settings["CapabilityBoundingSet"] == [""]


def test_parameters_are_those_of_the_command() -> None:
    taken = parameters_of(["serve", "--port", "81", "--model", "some/model"])
    assert (taken["port"], taken["host"]) == (81, "127.0.0.1")


@pytest.mark.parametrize(
    "words",
    [["serve", "--prot", "1"], ["serve", "--port", "many"], ["serves"], ["serve", "-x"]],
)
def test_what_kvell_does_not_have_is_refused(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parameters_of(words)
